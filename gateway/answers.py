"""vLLM's answers as clients get them: what is vLLM's own and has nothing to say in this answer stays out."""

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
"""Where else they stand than at the top."""


def body(answer: pydantic.BaseModel) -> dict[str, Any]:
    """An answer's JSON."""
    made = _spoken(answer.model_dump(mode="json", by_alias=True))
    return made | {"usage": detailed(made["usage"])} if "usage" in made else made


class InPieces:
    """An answer whose log probabilities are text already, for they may be many.

    Every single call holds the interpreter, and all other requests with it: so they are written one token at a time.
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
        """As it is shown, with marks where log probabilities belong."""
        for choice, mark in zip(self.body["choices"], marks, strict=True):
            choice["logprobs"] = mark

    def response(self, body: dict[str, Any]) -> Response:
        """All of it; `body` may have got more fields since."""
        rest = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        parts = []
        for mark, piece in self._pieces.items():
            before, _, rest = rest.partition(f'"{mark}"')
            parts += [before.encode(), piece]
        return Response(b"".join([*parts, rest.encode()]), media_type="application/json")


async def in_pieces(make: Callable[[], Any], shown: Callable[[Any], dict[str, Any]]) -> InPieces:
    """What `make` makes, put together beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_MAKING, _made, make, shown)


_MAKING = ThreadPoolExecutor(1, "answers")
"""One such answer at a time."""
_TURN, _PAUSE_S = 128, 1e-4
"""Tokens after which the event loop gets the interpreter, which short calls one after the other would keep for long."""


def _made(make: Callable[[], Any], shown: Callable[[Any], dict[str, Any]]) -> InPieces:
    # Looking for garbage among so many new objects holds the interpreter for long, too.
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
