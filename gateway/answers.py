"""vLLM's answers as clients get them: fields that only vLLM has are left out where they are null."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pydantic
from starlette.responses import Response

from backend.engine.front.deferred import discard
from backend.engine.front.usage import detailed

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

    A call that serializes holds the interpreter, and with it all other requests.  So there is one call per token.
    """

    def __init__(self, answer: Any, shown: Callable[[Any], dict[str, Any]]) -> None:
        self._pieces: dict[str, bytes] = {}
        marks: list[str | None] = []
        for choice in answer.choices:
            marks.append(None if choice.logprobs is None else secrets.token_hex(8))
            if marks[-1]:
                self._pieces[marks[-1]] = _text(choice.logprobs).encode()
                choice.logprobs = None
        self.body = shown(answer)
        """The answer's JSON object, with random marks in place of log probabilities."""
        for choice, mark in zip(self.body["choices"], marks, strict=True):
            choice["logprobs"] = mark

    def response(self, body: dict[str, Any]) -> Response:
        """The whole response.  `body` is `self.body`, perhaps with fields added."""
        rest = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        parts = []
        for mark, piece in self._pieces.items():
            before, _, rest = rest.partition(f'"{mark}"')
            parts += [before.encode(), piece]
        return Response(b"".join([*parts, rest.encode()]), media_type="application/json")


async def in_pieces(make: Callable[[], Any], shown: Callable[[Any], dict[str, Any]]) -> InPieces:
    """The answer of `make`, serialized in a thread; `shown` makes its JSON object."""
    return await asyncio.get_running_loop().run_in_executor(_MAKING, _made, make, shown)


_MAKING = ThreadPoolExecutor(1, "answers")
"""Serializes one such answer at a time."""
_TURN, _PAUSE_S = 128, 1e-4
"""After so many tokens the thread sleeps so many seconds, so that the event loop gets the interpreter."""


def _made(make: Callable[[], Any], shown: Callable[[Any], dict[str, Any]]) -> InPieces:
    # A garbage collection over so many new objects would also hold the interpreter for long.
    gc.disable()
    try:
        return InPieces(make(), shown)
    finally:
        gc.enable()


def _text(logprobs: pydantic.BaseModel) -> str:
    fields = (f'"{name}":{_list(values)}' for name, values in logprobs)
    return "{" + ",".join(fields) + "}"


def _list(values: Any) -> str:
    if values is None:
        return "null"
    each = []
    for at, one in enumerate(values):
        each.append(one.model_dump_json() if isinstance(one, pydantic.BaseModel) else json.dumps(one))
        if at % _TURN == 0:
            time.sleep(_PAUSE_S)
    discard(values)
    return "[" + ",".join(each) + "]"


def _spoken(value: dict[str, Any]) -> dict[str, Any]:
    kept = {name: each for name, each in value.items() if each is not None or name not in _SILENT_WHEN_NULL}
    for name in _ANSWERED:
        inner = kept.get(name)
        if isinstance(inner, dict):
            kept[name] = _spoken(inner)
        elif isinstance(inner, list):
            kept[name] = [_spoken(each) for each in inner]
    return kept
