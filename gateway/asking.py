"""What a request asks of its own: the body's `outrider` and `prediction`, and a header.  Nothing of it changes a token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from backend.config import Settings
from backend.wire.engine import Asked
from gateway.errors import BadRequest
from gateway.fields import without_nulls
from gateway.inquiry import Inquiry
from gateway.state import Gateway

STATS_HEADER = "x-outrider-stats"
MODES: Mapping[str, tuple[str, ...]] = {
    "off": ("auto", "off"),
    "native": ("auto",),
    "sync": ("auto", "off", "sync"),
    "ahead": ("auto", "off", "sync", "ahead"),
    "auto": ("auto", "off", "sync", "ahead"),
}
"""By the fleet's mode, those that a request may ask for.  vLLM's own speculation cannot be switched per request."""
MAX_PREDICTION_TOKENS = 1 << 14
"""Tokens of a prediction that draft; the answer is rarely longer, and a verifier keeps some hundred bytes for each."""
_CHARS_PER_TOKEN = 8
"""Text beyond so many is not tokenized: it would only be cut."""
_FIELDS = ("stats", "mode", "num_speculative_tokens", "logprobs_mode", "learn")


async def inquire(gateway: Gateway, request: Request, data: Mapping[str, Any]) -> Inquiry | None:
    """What a request with the body `data`, within its bounds, asks; None: nothing.  Raises `BadRequest` naming the field."""
    options = _options(data.get("outrider"))
    stats = _stats(options.get("stats"), request.headers.get(STATS_HEADER))
    mode, longest = _mode(options, gateway.settings), _longest(options, gateway.settings)
    text = _predicted(data.get("prediction"))
    prediction = await _tokens(gateway, text) if text else []
    logprobs_mode = _logprobs_mode(options, gateway.settings)
    learn = options.get("learn", True)
    if not isinstance(learn, bool):
        raise BadRequest("`outrider.learn` must be true or false.", param="outrider.learn")
    account = stats or bool(prediction)
    asked = Asked(account, mode, longest, prediction, logprobs_mode, learn)  # type: ignore[arg-type]  # its literals
    if asked == Asked():
        return None
    if asked.account and data.get("use_beam_search"):
        raise BadRequest("Beam search has no account of its drafts.", param="use_beam_search")
    return Inquiry(asked, stats, gateway.settings.mode)


def with_usage(data: dict[str, Any], inquiry: Inquiry | None) -> dict[str, Any]:
    """A stream that asks for what it did asks for its usage, too: both are in one chunk."""
    if inquiry is None or not inquiry.stats or not data.get("stream"):
        return data
    options = data.get("stream_options")
    return {**data, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}


def _options(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest("`outrider` must be an object.", param="outrider")
    for name in value:
        if name not in _FIELDS:
            raise BadRequest(f"Unknown parameter `outrider.{name[:64]}`.", param="outrider", code="unknown_parameter")
    return without_nulls(value)


def _stats(field: Any, header: str | None) -> bool:
    if not isinstance(field, bool | None):
        raise BadRequest("`outrider.stats` must be true or false.", param="outrider.stats")
    if header not in (None, "0", "1"):
        raise BadRequest(f"The header `{STATS_HEADER}` must be 0 or 1.", param=STATS_HEADER)
    return header == "1" if field is None else field


def _mode(options: Mapping[str, Any], settings: Settings) -> str:
    mode, known = options.get("mode", "auto"), MODES[settings.mode]
    if mode not in known:
        raise BadRequest(f"`outrider.mode` must be one of {', '.join(known)} in this fleet.", param="outrider.mode")
    return str(mode)


def _longest(options: Mapping[str, Any], settings: Settings) -> int | None:
    name = "outrider.num_speculative_tokens"
    longest = options.get("num_speculative_tokens")
    if longest is None:
        return None
    if settings.mode in ("off", "native"):
        raise BadRequest(f"`{name}` cannot be chosen in mode {settings.mode}.", param=name)
    most = settings.num_speculative_tokens
    if type(longest) is not int or not 0 <= longest <= most:
        raise BadRequest(f"`{name}` must be an integer from 0 to {most}.", param=name)
    return longest


def _logprobs_mode(options: Mapping[str, Any], settings: Settings) -> str | None:
    name = "outrider.logprobs_mode"
    mode = options.get("logprobs_mode")
    if mode not in (None, "raw", "processed"):
        raise BadRequest(f"`{name}` must be raw or processed.", param=name)
    if mode is not None and settings.mode == "native":
        raise BadRequest(f"`{name}` cannot be chosen in mode native: vLLM's own sampler has one for all requests.", param=name)
    return mode


def _predicted(prediction: Any) -> str:
    """The text that an answer is predicted to be."""
    if prediction is None:
        return ""
    if not isinstance(prediction, dict) or prediction.keys() != {"type", "content"} or prediction["type"] != "content":
        raise BadRequest('`prediction` must be an object of type "content" with `content`.', param="prediction")
    content = prediction["content"]
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest("`prediction.content` must be text or a list of text parts.", param="prediction.content")
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise BadRequest("`prediction.content` must contain only parts of type text.", param="prediction.content")
        if not isinstance(part["text"], str):
            raise BadRequest("`prediction.content` must contain only strings as text.", param="prediction.content")
    return "".join(part["text"] for part in content)


async def _tokens(gateway: Gateway, text: str) -> list[int]:
    most = min(MAX_PREDICTION_TOKENS, gateway.client.model_config.max_model_len)
    encode = gateway.client.renderer.get_tokenizer().encode
    async with gateway.tokenizing:
        tokens: list[int] = await asyncio.to_thread(encode, text[: most * _CHARS_PER_TOKEN], add_special_tokens=False)
    return tokens[:most]
