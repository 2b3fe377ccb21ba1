"""vLLM's answers as clients get them: of fields that are null, only some of OpenAI's are shown."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pydantic
from pydantic_core import to_json
from starlette.responses import Response

from backend.engine.front.deferred import Deferred, discard, in_turns
from backend.engine.front.stream import detailed
from gateway.http.errors import checked

_OF_USAGE = {"cached_tokens", "completion_tokens", "completion_tokens_details", "prompt_tokens_details"}
_NULLABLE = _OF_USAGE | {"content", "finish_reason", "logprobs", "refusal", "service_tier", "system_fingerprint"}
"""Fields of OpenAI's that clients get even where they are null."""
_ANSWERED = ("choices", "message", "prompt_tokens_details", "usage")
"""Fields of an answer whose objects are cleaned of such nulls too."""


def body(answer: pydantic.BaseModel) -> dict[str, Any]:
    """An answer's JSON."""
    made = _without_nulls(answer.model_dump(mode="json", by_alias=True))
    return made | {"usage": detailed(made["usage"])} if "usage" in made else made


class Whole:
    """An answer whose log probabilities are serialized apart, because they may be many."""

    def __init__(self, answer: Any, shown: Callable[[Any], dict[str, Any]]) -> None:
        self._texts: list[bytes | None] = []
        for each, name in _bearers(answer, getattr):
            values = getattr(each, name, None)
            self._texts.append(None if values is None else _text(values))
            if values is not None:
                setattr(each, name, None)
        self.body = shown(answer)
        """The answer's JSON object, without log probabilities."""

    def response(self, body: dict[str, Any]) -> Response:
        """The whole response.  `body` is `self.body`, perhaps with fields added."""
        for (each, name), text in zip(_bearers(body, dict.get), self._texts, strict=True):
            if text is not None:
                each[name] = msgspec.Raw(text)
        return in_turns(msgspec.json.encode(body))


def _bearers(answer: Any, get: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """What may have log probabilities in an answer, or in its JSON, and under which name."""
    yield answer, "prompt_logprobs"
    for choice in get(answer, "choices", None) or ():
        yield choice, "logprobs"
        yield choice, "prompt_logprobs"
    for item in get(answer, "output", None) or ():
        yield from ((part, "logprobs") for part in get(item, "content", None) or () if get(part, "type", None) == "output_text")


async def whole(answer: Deferred, shown: Callable[[Any], dict[str, Any]]) -> Whole:
    """vLLM's answer, made and serialized in a thread; `shown` makes its JSON object."""
    return await asyncio.get_running_loop().run_in_executor(_MAKING, _made, answer, shown)


_MAKING = ThreadPoolExecutor(1, "answers")
"""Serializes one such answer at a time."""
_TURN = 128
"""Tokens that one call serializes.  It holds the interpreter, and with it all other requests."""


def _made(answer: Deferred, shown: Callable[[Any], dict[str, Any]]) -> Whole:
    # Garbage collections over so many new objects double the CPU time, and each holds the interpreter for up to seconds.
    gc.disable()
    try:
        return Whole(checked(answer.make()), shown)
    finally:
        gc.enable()


def _text(logprobs: Any) -> bytes:
    if isinstance(logprobs, list):
        return _list(logprobs)
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), _list(values)) for name, values in logprobs)


def _list(values: list[Any] | None) -> bytes:
    if values is None:
        return b"null"
    pieces = [to_json(values[start : start + _TURN])[1:-1] for start in range(0, len(values), _TURN)]
    discard(values)
    return b"[%b]" % b",".join(pieces)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """The answer without nulls that clients do not expect, also in the objects inside."""
    kept = {name: each for name, each in value.items() if each is not None or name in _NULLABLE}
    for name in _ANSWERED:
        inner = kept.get(name)
        if isinstance(inner, dict):
            kept[name] = _without_nulls(inner)
        elif isinstance(inner, list):
            kept[name] = [_without_nulls(each) for each in inner]
    return kept
