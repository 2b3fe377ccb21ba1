"""Plain streams: one text, no tools, reasoning, logprobs, token ids or echo, as most clients ask for.  Gateway's event loop.

vLLM's serving classes check and render the request; its output processor detokenizes and finds stop strings.  Only their work
per chunk (a `RequestOutput`, a queue, three generators, pydantic) is replaced: new text goes from the output processor into an
event as bytes, of structs with the fields of vLLM's chunks in vLLM's order.  All other streams are vLLM's own.
"""

import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from vllm.exceptions import GenerationError
from vllm.v1.engine import FinishReason

from backend.engine.front.client import FleetClient, Submit

DONE = b"data: [DONE]\n\n"
_DETAILS = {
    "prompt_tokens_details": ("audio_tokens", "cached_tokens"),
    "completion_tokens_details": (
        "accepted_prediction_tokens",
        "audio_tokens",
        "reasoning_tokens",
        "rejected_prediction_tokens",
    ),
}
_LAST = '"choices":[]'
"""Stands in the chunk with the usage and in no other; in text, its quotes would be escaped."""
_to_json = msgspec.json.Encoder().encode


class _Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChoice(Struct):
    index: int
    delta: _Delta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: UnsetType | None = UNSET


class _TextChoice(Struct):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: None = None
    token_ids: None = None


class _Chunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChatChoice | _TextChoice]
    usage: dict[str, Any] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: UnsetType | None = UNSET
    prompt_text: UnsetType | None = UNSET


class Sink(Protocol):
    """Where a stream's events go."""

    def put(self, events: bytes) -> None:
        """Takes one or more complete events."""
        ...

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream: it is complete, or failed with `error`."""
        ...


@dataclass(frozen=True)
class Form:
    """What the chunks of a stream have in common."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    """Only the last event has it; that is the usage event, if usage was asked for."""
    role: str | None
    """A chat's first chunk names it.  None: a completion."""
    include_usage: bool
    sparse: bool = False
    """A chunk without text is left out, or has no content."""

    def chunk(self, *choices: _ChatChoice | _TextChoice) -> _Chunk:
        """A chunk around a choice, or none."""
        kind = "text_completion" if self.role is None else "chat.completion.chunk"
        return _Chunk(self.id, kind, self.created, self.model, list(choices))


def _event(chunk: _Chunk) -> bytes:
    return b"data: %b\n\n" % _to_json(chunk)


class PlainStream:
    """One sequence's stream.  `start` submits it; then the sink gets events as vLLM's output processor makes text.

    It takes the place of the sequence's output queue.
    """

    def __init__(self, client: FleetClient[Any], submit: Submit, form: Form) -> None:
        self._client = client
        self._submit = submit
        self._id: str | None = None
        """The id of the sequence, while it runs or after it has failed."""
        self._form = form
        self._delta = _Delta()
        self._choice = _TextChoice(0, "") if form.role is None else _ChatChoice(0, self._delta, token_ids=None)
        self._chunk = form.chunk(self._choice)
        """Made once: new text is put into it."""
        self._has_begun = False
        self._tokens = 0

    async def start(self, sink: Sink) -> None:
        """Submits the sequence; raises what vLLM raises."""
        self._sink = sink
        queue = await self._submit()
        # No output is processed before this task suspends again.
        self._id = queue.request_id
        self._state = state = self._client.output_processor.request_states[queue.request_id]
        state.queue, state.make_request_output = self, self.take

    async def close(self) -> None:
        """Aborts the sequence if it still runs.  Never suspends, so it also works in a task that is being cancelled."""
        if self._id is not None:
            await self._client.abort([self._id], internal=True)

    def put(self, error: Any) -> None:
        """The queue's method.  vLLM only calls it with errors, because `take` returns no outputs."""
        if isinstance(error, Exception):
            self._sink.end(error)

    def take(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Replaces `RequestState.make_request_output`: sends an event instead of making an output."""
        form, state = self._form, self._state
        if finish_reason is not None:
            # Breaks the reference cycle between state and stream.
            del state.make_request_output
        if form.role is not None and not self._has_begun:
            first = form.chunk(_ChatChoice(0, _Delta(form.role, "")))
            first.prompt_token_ids = first.prompt_text = None
            self._sink.put(_event(first))
        self._has_begun = True
        text = state.detokenizer.get_next_output_text(finish_reason is not None, True)
        if finish_reason is FinishReason.ERROR:
            self._sink.end(GenerationError())
            return
        self._tokens += len(new_token_ids)
        # Without tokens and text, only a part of a long prompt was computed.
        # With a parser, no text means no chunk, unless it has a finish reason.
        mute = not text and (form.sparse or not self._tokens)
        if finish_reason is not None or not mute:
            choice, chunk = self._choice, self._chunk
            if isinstance(choice, _ChatChoice):
                self._delta.content = UNSET if mute else text
            else:
                choice.text = text
            if finish_reason is not None:
                choice.finish_reason, choice.stop_reason = str(finish_reason), stop_reason
                if form.fingerprint is not None and not form.include_usage:
                    chunk.system_fingerprint = form.fingerprint
            self._sink.put(_event(chunk))
        if finish_reason is not None:
            self._id = None
            if form.include_usage:
                self._sink.put(_event(self._usage_chunk()))
            self._sink.put(DONE)
            self._sink.end()

    def _usage_chunk(self) -> _Chunk:
        state, form = self._state, self._form
        details = {"cached_tokens": state.num_cached_tokens}
        if form.role is not None:
            details["created_cache_tokens"] = state.num_cache_creation_tokens
        prompt, completion = state.prompt_len, self._tokens
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        known = {name: count for name, count in details.items() if count is not None}
        chunk = form.chunk()
        chunk.usage = detailed({**usage, "prompt_tokens_details": known})
        chunk.system_fingerprint = UNSET if form.fingerprint is None else form.fingerprint
        return chunk


def detailed(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer as OpenAI's clients know it: details that vLLM leaves out, or never counts, are 0."""
    return usage | {name: dict.fromkeys(all_of_it, 0) | (usage.get(name) or {}) for name, all_of_it in _DETAILS.items()}


class RaisesErrors:
    """Mixin over vLLM's serving classes: raises an exception of which vLLM's answer or event would have the message only."""

    def create_error_response(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method of the same name, by which it makes all of these."""
        if isinstance(error := sys.exception(), Exception):
            raise error
        return super().create_error_response(*args, **kwargs)  # type: ignore[misc]


async def streamed(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events of vLLM's stream, the last one with such a usage."""
    try:
        async for chunk in chunks:
            if _LAST in chunk:
                last = json.loads(chunk.removeprefix("data: "))
                last["usage"] = detailed(last["usage"])
                chunk = f"data: {json.dumps(last, ensure_ascii=False, separators=(',', ':'))}\n\n"
            yield chunk
    finally:
        await chunks.aclose()
