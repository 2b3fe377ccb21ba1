"""From the bytes of a request to vLLM's request model: read, bounded, parsed, checked; or an error that names the field.

vLLM accepts unknown fields in silence; we do not.  Its extension fields (`top_k`, `structured_outputs`, ...) are fine.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
from collections.abc import AsyncGenerator, Mapping, Set
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request

from backend.engine.front.grammar import asked_in
from backend.wire.engine import FIXED_RESPONSE
from gateway.bounds import check_bounds, check_structure, check_text, grammar_field
from gateway.errors import BadRequest, PayloadTooLarge, UnsupportedMedia, from_pydantic
from gateway.fields import NO_EFFECT, REFUSED, Fits, without_nulls
from gateway.guard import read_body

LARGE_BYTES = 1 << 18
"""A larger body is decoded in a thread: each of the steps holds the interpreter, but not all of them in one go."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class Body(pydantic.BaseModel):
    """A request, or an object in one, that is no model of vLLM's: nothing is converted, and no unknown field taken."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request's JSON object.  Raises `UnsupportedMedia`, `PayloadTooLarge` or `BadRequest`."""
    if media_type(request) != "application/json":
        raise UnsupportedMedia("The request body must be application/json.")
    body = await read_bytes(request, max_bytes)
    data = await asyncio.to_thread(_decode, body) if len(body) > LARGE_BYTES else _decode(body)
    if not isinstance(data, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    check_text(data, request.app.state.gateway.client.model_config.max_model_len)
    asked_in.set(grammar_field(data))
    return data


def media_type(request: Request) -> str:
    """What the body is said to be, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_bytes(request: Request, max_bytes: int) -> bytearray:
    """The request's body.  Raises what `read_body` does."""
    return await read_body(request.scope, request.receive, max_bytes)


async def bounded(request: Request, max_bytes: int, too_large: PayloadTooLarge) -> AsyncGenerator[bytes, None]:
    """The body as it comes.  Raises `too_large` as soon as it is known to be."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        yield chunk


def _decode(body: bytearray) -> Any:
    check_structure(body)
    try:
        text = body.decode()
        data = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(text):
            # Half a pair is no character: nothing behind us could encode it.
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from None
    return data


def _finite(number: str) -> float:
    """JSON has no NaN and no infinity, and a sampler fed with one harms its whole batch; `1e999` is one in disguise."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(number)
    return value


def parse(model: type[ModelT], data: dict[str, Any], no_effect: Mapping[str, Fits] = NO_EFFECT) -> ModelT:
    """`data` as `model`, without nulls and fields that have no effect.  Raises `BadRequest` or pydantic's ValidationError."""
    check_bounds(data)
    return fitted(model, data, no_effect)


def fitted(model: type[ModelT], data: dict[str, Any], no_effect: Mapping[str, Fits] = NO_EFFECT) -> ModelT:
    """`parse` of what is within its bounds."""
    kept = check_fields(model, without_nulls(data), no_effect)
    try:
        return model.model_validate(kept)
    except (TypeError, AttributeError, KeyError):
        # vLLM's own validators run before the types are checked and trip over wrong ones.
        raise BadRequest("A field of the request has the wrong type.") from None


def read_object(model: type[ModelT], value: Any, name: str) -> ModelT:
    """The object in the field `name`.  Raises `ApiError` that names the field, and the one in it."""
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise from_pydantic(error, name) from None


def check_fields(model: type[pydantic.BaseModel], data: dict[str, Any], no_effect: Mapping[str, Fits]) -> dict[str, Any]:
    """`data` without fields that have no effect.  Raises `BadRequest` naming an unknown field and the nearest valid one."""
    known = _names(model)
    kept = {}
    for name, value in data.items():
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
    """What to say of a field that is not `known`."""
    shown = name[:64]
    if name in REFUSED:
        return f"The parameter `{shown}` is not supported; {REFUSED[name]}."
    if name in no_effect:
        return f"This value of `{shown}` is not supported."
    nearest = difflib.get_close_matches(shown, sorted(known), n=1)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return f"Unknown parameter `{shown}`.{hint}"


def check_generation(request: Any, *, max_n: int, vllm_speculates: bool) -> None:
    """What we refuse although vLLM's request models take it.  Raises `BadRequest` naming the parameter."""
    n = getattr(request, "n", 1)
    if n is not None and not 1 <= n <= max_n:
        raise BadRequest(f"`n` must be between 1 and {max_n}.", param="n")
    if FIXED_RESPONSE in (getattr(request, "vllm_xargs", None) or {}):
        raise BadRequest(f"`{FIXED_RESPONSE}` belongs to rollouts.", param="vllm_xargs")
    if vllm_speculates:
        # Its rejection sampler rules them out.
        unsupported = [name for name in ("min_p", "logit_bias") if getattr(request, name, None)]
        if unsupported:
            raise BadRequest(f"`{unsupported[0]}` is not supported in mode native.", param=unsupported[0])
