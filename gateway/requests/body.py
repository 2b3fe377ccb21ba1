"""Reads, bounds, parses and checks a request's body into one of vLLM's request models.  Errors name the field.

vLLM ignores unknown fields; this gateway refuses them.  vLLM's own fields (`top_k`, `structured_outputs`, ...) are accepted.
"""

import asyncio
import difflib
from collections.abc import Iterator, Mapping, Set
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import pydantic
from starlette.requests import Request

from backend.engine.front import VLLMClientError
from backend.engine.front.grammar import constraint_field
from backend.wire.engine import FIXED_RESPONSE
from gateway.http.errors import ApiError, BadRequest, UnsupportedMedia, from_pydantic
from gateway.http.middleware import take_name
from gateway.requests.fields import EMPTY, NO_EFFECT, REFUSED, Fits, drop_nulls
from gateway.requests.limits import MAX_CHOICES, check_bounds, check_structure, check_text, grammar_field

TENSORS = "application/octet-stream"
"""The media type of weights in a body."""
LARGE_BYTES = 1 << 18
"""Larger bodies are decoded in a thread.  Each step of decoding holds the interpreter, but others run in between."""
ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class Body(pydantic.BaseModel):
    """Base of our own models of requests and of objects in them.  Values are not converted; unknown fields are refused."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")


async def read_json(request: Request, *, bounded: bool = True) -> dict[str, Any]:
    """The request's JSON object, within the bounds of `limits.py` if `bounded`.  Raises `UnsupportedMedia` or `BadRequest`."""
    if media_type(request) != "application/json":
        raise UnsupportedMedia("The request body must be application/json.")
    body = request.state.body
    data = await asyncio.to_thread(decode, body) if len(body) > LARGE_BYTES else decode(body)
    if not isinstance(data, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    if bounded:
        check_text(data, request.app.state.gateway.client.model_config.max_model_len)
        check_bounds(data)
    constraint_field.set(grammar_field(data))
    if "request_id" in data:
        take_name(request, data["request_id"])
    return data


def media_type(request: Request) -> str:
    """The media type of the `content-type` header, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def header_flag(request: Request, header: str) -> bool | None:
    """What the header says; None without it.  Raises `BadRequest` unless it is 0 or 1."""
    value = request.headers.get(header)
    if value not in (None, "0", "1"):
        raise BadRequest(f"The header `{header}` must be 0 or 1.", param=header)
    return None if value is None else value == "1"


def decode(body: bytearray) -> Any:
    """A body's JSON.  Raises `BadRequest` for others, also for NaN, infinity (`1e999`) and half of a surrogate pair.

    In a sampler, the former would harm the whole batch; no later code could encode the latter.
    """
    check_structure(body)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from None
    if b"null" in body:
        drop_nulls(data)
    return data


def parse(model: type[ModelT], data: dict[str, Any], no_effect: Mapping[str, Fits] = NO_EFFECT) -> ModelT:
    """Makes a `model` of bounded data, without fields that have no effect.  Raises `BadRequest` or ValidationError."""
    kept = check_fields(model, data, no_effect)
    try:
        made = model.model_validate(kept)
        _read_lists(getattr(made, "messages", None), "messages")
        return made
    except pydantic.ValidationError as error:
        if not _is_lists_own(error):
            raise
        raise _of_tool_calls(model, kept) from None
    except _TRIPPED:
        wrong = _wrong_field(model, kept)
        raise BadRequest(f"{f'`{wrong}`' if wrong else 'A field of the request'} has the wrong type.", param=wrong) from None


def _read_lists(messages: Any, place: str) -> None:
    """Reads the lists in messages, which pydantic checks only then.  Raises `BadRequest` naming the place."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, list):
            _read_lists(message, f"{place}.{index}")
        for name, value in message.items() if isinstance(message, dict) else ():
            if isinstance(value, Iterator):
                try:
                    message[name] = list(value)
                except pydantic.ValidationError as error:
                    raise _in_list(error, f"{place}.{index}.{name}") from None


def _is_lists_own(error: pydantic.ValidationError) -> bool:
    """Whether a list was read that pydantic checks only then: the place is one in that list."""
    return isinstance(next(iter(error.errors(include_url=False, include_input=False)[0]["loc"]), None), int)


def _in_list(error: pydantic.ValidationError, place: str) -> ApiError:
    known = from_pydantic(error, place)
    known.param = "messages"
    return known


def _of_tool_calls(model: type[pydantic.BaseModel], kept: dict[str, Any]) -> ApiError:
    """The error of the first message with a wrong tool call.  vLLM's own validator reads these, and does not say of which."""
    for index, message in enumerate(kept["messages"]):
        try:
            model.model_validate({**kept, "messages": [message]})
        except pydantic.ValidationError as error:
            return _in_list(error, f"messages.{index}.tool_calls")
    raise AssertionError("together they are wrong")


_TRIPPED = (TypeError, AttributeError, KeyError)
"""vLLM's own validators run before the types are checked, and trip over wrong ones."""


def _wrong_field(model: type[pydantic.BaseModel], kept: dict[str, Any]) -> str | None:
    """The field that a validator trips over by itself, or without which types are checked."""

    def outcome(data: dict[str, Any]) -> type[BaseException] | None:
        try:
            model.model_validate(data)
        except (*_TRIPPED, pydantic.ValidationError, VLLMClientError) as error:
            return type(error)
        return None

    for name, value in kept.items():
        if outcome({name: value}) in _TRIPPED:
            return name
    for name in kept:
        if outcome({other: value for other, value in kept.items() if other != name}) in (None, pydantic.ValidationError):
            return name
    return None


def read_field(model: type[ModelT], value: Any, name: str) -> ModelT | None:
    """The request's field `name` as a `model`; None without it.  Raises `ApiError`, which names it and the inner field."""
    try:
        return None if value is None else model.model_validate(value)
    except pydantic.ValidationError as error:
        raise from_pydantic(error, name) from None


def check_fields(model: type[pydantic.BaseModel], data: dict[str, Any], no_effect: Mapping[str, Fits]) -> dict[str, Any]:
    """`data` without what asks for nothing or has no effect.  Raises `BadRequest` naming an unknown field and the nearest."""
    known = _names(model)
    kept = {}
    for name, value in data.items():
        if value is None or (name in EMPTY and value == EMPTY[name]):
            continue
        if name in known and name not in REFUSED:
            kept[name] = value
        elif name not in no_effect or not no_effect[name](value):
            raise BadRequest(unknown(name, known, no_effect), param=name[:64], code="unknown_parameter")
    options = kept.get("stream_options")
    if isinstance(options, dict):
        for name in options.keys() - {"include_usage", "continuous_usage_stats", "include_obfuscation"}:
            raise BadRequest(unknown(name, {"include_usage"}), param="stream_options", code="unknown_parameter")
        kept["stream_options"] = {key: value for key, value in options.items() if key != "include_obfuscation"}
    return kept


@cache
def _names(model: type[pydantic.BaseModel]) -> frozenset[str]:
    return frozenset(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}


def unknown(name: str, known: Set[str], no_effect: Mapping[str, Fits] = MappingProxyType({})) -> str:
    """The error message for a field that is not in `known`."""
    shown = name[:64]
    if name in REFUSED:
        return f"The parameter `{shown}` is not supported; {REFUSED[name]}."
    if name in no_effect:
        return f"This value of `{shown}` is not supported."
    nearest = difflib.get_close_matches(shown, sorted(known), n=1)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return f"Unknown parameter `{shown}`.{hint}"


def check_generation(request: Any, *, vllm_speculates: bool) -> None:
    """Refuses what vLLM's request models accept and this server does not.  Raises `BadRequest` naming the parameter."""
    n = getattr(request, "n", 1)
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"`n` must be between 1 and {MAX_CHOICES}.", param="n")
    if FIXED_RESPONSE in (getattr(request, "vllm_xargs", None) or {}):
        raise BadRequest(f"`{FIXED_RESPONSE}` belongs to rollouts.", param="vllm_xargs")
    if vllm_speculates:
        # vLLM's rejection sampler does not support them.
        unsupported = [name for name in ("min_p", "logit_bias", "logprob_token_ids") if getattr(request, name, None)]
        if unsupported:
            raise BadRequest(f"`{unsupported[0]}` is not supported in mode native.", param=unsupported[0])
