"""Outrider's own request options: the fields `outrider` and `prediction`, and a header.  None of them changes a token."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from backend.config import Settings
from backend.wire.engine import RequestOptions
from gateway.fleet.statistics import SpeculationOptions
from gateway.http.errors import BadRequest
from gateway.requests.body import Body, header_flag, read_field
from gateway.state import Gateway

STATS_HEADER = "x-outrider-stats"
MODES: Mapping[str, tuple[str, ...]] = {
    "off": ("auto", "off"),
    "native": ("auto",),
    "sync": ("auto", "off", "sync"),
    "ahead": ("auto", "off", "sync", "ahead"),
    "auto": ("auto", "off", "sync", "ahead"),
}
"""The modes that a request may ask for, by the fleet's mode.  vLLM's own speculation cannot be switched per request."""
MAX_PREDICTION_TOKENS = 1 << 14
"""Most tokens of a prediction that serve as drafts.  An answer is rarely longer, and a verifier keeps some hundred bytes for
each token."""
_CHARS_PER_TOKEN = 8
"""Characters of a prediction that are tokenized, per token allowed.  More would be cut."""


class Options(Body):
    """The body's `outrider`."""

    stats: bool | None = None
    mode: Literal["auto", "off", "sync", "ahead"] | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    learn: bool | None = None


class TextPart(Body):
    """A part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's `prediction`: the text that an answer is predicted to be."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


async def read_options(gateway: Gateway, request: Request, data: Mapping[str, Any]) -> SpeculationOptions | None:
    """The options of a request with the body `data`, whose bounds were checked; None: it has none.

    Raises `BadRequest` naming the field.
    """
    options = read_field(Options, data.get("outrider"), "outrider") or Options()
    _check(options, gateway.settings)
    by_header = header_flag(request, STATS_HEADER)
    stats = bool(by_header if options.stats is None else options.stats)
    predicted = read_field(Prediction, data.get("prediction"), "prediction")
    prediction = await _tokens(gateway, predicted.text) if predicted and predicted.text else []
    account = stats or bool(prediction)
    mode, longest, learn = options.mode or "auto", options.num_speculative_tokens, options.learn is not False
    wanted = RequestOptions(account, mode, longest, prediction, options.logprobs_mode, learn)
    if wanted == RequestOptions():
        return None
    if wanted.account and data.get("use_beam_search"):
        raise BadRequest("Beam search has no account of its drafts.", param="use_beam_search")
    return SpeculationOptions(wanted, stats, gateway.settings.mode)


def with_usage(data: dict[str, Any], speculation: SpeculationOptions | None) -> dict[str, Any]:
    """`data`; for a stream with statistics, with usage switched on, because one chunk contains both."""
    if speculation is None or not speculation.stats or not data.get("stream"):
        return data
    options = data.get("stream_options")
    return {**data, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}


def _check(options: Options, settings: Settings) -> None:
    """Raises `BadRequest` for options that this fleet does not support."""
    known = MODES[settings.mode]
    if options.mode is not None and options.mode not in known:
        raise BadRequest(f"`outrider.mode` must be one of {', '.join(known)} in this fleet.", param="outrider.mode")
    name, most = "outrider.num_speculative_tokens", settings.num_speculative_tokens
    if options.num_speculative_tokens is not None:
        if settings.mode in ("off", "native"):
            raise BadRequest(f"`{name}` cannot be chosen in mode {settings.mode}.", param=name)
        if options.num_speculative_tokens > most:
            raise BadRequest(f"`{name}` must be an integer from 0 to {most}.", param=name)
    name = "outrider.logprobs_mode"
    if options.logprobs_mode is not None and settings.mode == "native":
        raise BadRequest(f"`{name}` cannot be chosen in mode native: vLLM's own sampler has one for all requests.", param=name)


async def _tokens(gateway: Gateway, text: str) -> list[int]:
    most = min(MAX_PREDICTION_TOKENS, gateway.client.model_config.max_model_len)
    encode = gateway.client.renderer.get_tokenizer().encode
    async with gateway.tokenizing:
        tokens: list[int] = await asyncio.to_thread(encode, text[: most * _CHARS_PER_TOKEN], add_special_tokens=False)
    return tokens[:most]
