"""vLLM's answers as clients get them: fields that only vLLM has are left out where they are null."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import msgspec
import pydantic
from pydantic_core import to_json
from starlette.responses import Response

from backend.engine.front.deferred import Deferred, discard, in_turns
from backend.engine.front.usage import detailed
from gateway.errors import checked

_SILENT_WHEN_NULL = frozenset(
    {
        "annotations",
        "audio",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "created_cache_tokens",
        "ec_transfer_params",
        "function_call",
        "input_messages",
        "kv_transfer_params",
        "metrics",
        "multimodal_tokens",
        "output_messages",
        "parent",
        "prompt_logprobs",
        "prompt_text",
        "prompt_token_ids",
        "reasoning",
        "routed_experts",
        "stop_reason",
        "token_ids",
        "token_strs",
    }
)
_ANSWERED = ("choices", "message", "prompt_tokens_details", "usage")
"""Fields of an answer whose objects are cleaned of such nulls too."""


def body(answer: pydantic.BaseModel) -> dict[str, Any]:
    """An answer's JSON."""
    made = _spoken(answer.model_dump(mode="json", by_alias=True))
    return made | {"usage": detailed(made["usage"])} if "usage" in made else made


class InPieces:
    """An answer whose log probabilities were serialized apart, because they may be many.

    A call that serializes holds the interpreter, and with it all other requests.  So each call has few tokens.
    """

    def __init__(self, answer: Any, shown: Callable[[Any], dict[str, Any]]) -> None:
        self._pieces: list[list[bytes] | None] = []
        for each, name in _bearers(answer, getattr):
            values = getattr(each, name, None)
            self._pieces.append(None if values is None else _text(values))
            if values is not None:
                setattr(each, name, None)
        self.body = shown(answer)
        """The answer's JSON object, without log probabilities."""

    def response(self, body: dict[str, Any]) -> Response:
        """The whole response.  `body` is `self.body`, perhaps with fields added."""
        marked: dict[bytes, list[bytes]] = {}
        for (each, name), pieces in zip(_bearers(body, dict.get), self._pieces, strict=True):
            if pieces is not None:
                each[name] = secrets.token_hex(8)
                marked[each[name].encode()] = pieces
        rest = msgspec.json.encode(body)
        parts = []
        for mark in sorted(marked, key=rest.index):
            before, _, rest = rest.partition(b'"%b"' % mark)
            parts += [before, *marked[mark]]
        return in_turns([*parts, rest])


def _bearers(answer: Any, get: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """What may have log probabilities in an answer, or in its JSON, and under which name."""
    yield answer, "prompt_logprobs"
    for choice in get(answer, "choices", None) or ():
        yield choice, "logprobs"
        yield choice, "prompt_logprobs"
    for item in get(answer, "output", None) or ():
        yield from ((part, "logprobs") for part in get(item, "content", None) or () if get(part, "type", None) == "output_text")


async def in_pieces(answer: Deferred, shown: Callable[[Any], dict[str, Any]]) -> InPieces:
    """vLLM's answer, made and serialized in a thread; `shown` makes its JSON object."""
    return await asyncio.get_running_loop().run_in_executor(_MAKING, _made, answer, shown)


_MAKING = ThreadPoolExecutor(1, "answers")
"""Serializes one such answer at a time."""
_TURN, _PAUSE_S = 128, 1e-4
"""After so many tokens the thread sleeps so many seconds, so that the event loop gets the interpreter."""


def _made(answer: Deferred, shown: Callable[[Any], dict[str, Any]]) -> InPieces:
    # A garbage collection over so many new objects would also hold the interpreter for long.
    gc.disable()
    try:
        return InPieces(checked(answer.make()), shown)
    finally:
        gc.enable()


def _text(logprobs: Any) -> list[bytes]:
    if isinstance(logprobs, list):
        return _list(logprobs)
    fields = [[f',"{name}":'.encode(), *_list(values)] for name, values in logprobs]
    fields[0][0] = b"{" + fields[0][0][1:]
    return [*chain.from_iterable(fields), b"}"]


def _list(values: list[Any] | None) -> list[bytes]:
    if values is None:
        return [b"null"]
    pieces = []
    for start in range(0, len(values), _TURN):
        pieces.append((b"," if start else b"") + to_json(values[start : start + _TURN])[1:-1])
        time.sleep(_PAUSE_S)
    discard(values)
    return [b"[", *pieces, b"]"]


def _spoken(value: dict[str, Any]) -> dict[str, Any]:
    kept = {name: each for name, each in value.items() if each is not None or name not in _SILENT_WHEN_NULL}
    for name in _ANSWERED:
        inner = kept.get(name)
        if isinstance(inner, dict):
            kept[name] = _spoken(inner)
        elif isinstance(inner, list):
            kept[name] = [_spoken(each) for each in inner]
    return kept
