"""Plain streams: text without tools, reasoning, logprobs or echo, as most clients ask for.  Gateway's event loop.

vLLM's serving classes check and render the request; its output processor detokenizes and finds stop strings.  Only their work
per chunk (a `RequestOutput`, a queue, three generators, pydantic) is replaced: new text goes from the output processor into an
event as bytes, of structs with the fields of vLLM's chunks in vLLM's order.  All other streams are vLLM's own.
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from vllm.exceptions import GenerationError
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

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


class _Usage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    completion_tokens_details: UnsetType | None


class _Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChoice(Struct):
    index: int
    delta: _Delta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class _TextChoice(Struct):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _Chunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChatChoice | _TextChoice]
    usage: _Usage | dict[str, Any] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
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
    """A chat's first chunks name it.  None: a completion."""
    n: int
    token_ids: bool
    include_usage: bool
    usage: bool
    """Whether every chunk has the usage so far."""
    sparse: bool = False
    """A chunk without text is left out, or has no content."""

    def chunk(self, *choices: _ChatChoice | _TextChoice) -> _Chunk:
        """A chunk around a choice, or none."""
        kind = "text_completion" if self.role is None else "chat.completion.chunk"
        return _Chunk(self.id, kind, self.created, self.model, list(choices))

    def usage_of(self, prompt: int, tokens: int) -> _Usage | UnsetType:
        """What a chunk says of `prompt` tokens and those of the answer so far."""
        return _Usage(prompt, prompt + tokens, tokens, UNSET if self.role is None else None) if self.usage else UNSET


def _event(chunk: _Chunk) -> bytes:
    return b"data: %b\n\n" % _to_json(chunk)


class PlainStream:
    """One request's stream.  `start` submits the sequences; then the sink gets events as vLLM processes their outputs."""

    def __init__(
        self,
        client: FleetClient[Any],
        submit: list[Submit],
        form: Form,
    ) -> None:
        self._client = client
        self._submit = submit
        self._ids: list[str] = []
        self._open = 0
        self._first: RequestState | None = None
        self._failed = False
        self._prompt_tokens = self._completion_tokens = 0
        self.form = form

    async def start(self, sink: Sink) -> None:
        """Submits all sequences; raises what vLLM raises."""
        self.sink = sink
        self._open = len(self._submit) * self.form.n
        states = self._client.output_processor.request_states
        parents = self._client.output_processor.parent_requests
        for prompt, submit in enumerate(self._submit):
            queue = await submit()
            # No output is processed before this task suspends again.
            self._ids.append(queue.request_id)
            parent = parents.get(queue.request_id)
            for each in parent.child_requests if parent is not None else (queue.request_id,):
                state = states[each]
                choice = ChoiceStream(self, state, prompt * self.form.n + state.request_index)
                state.queue, state.make_request_output = choice, choice.take
            self._prompt_tokens += state.prompt_len

    async def close(self) -> None:
        """Aborts sequences that still run.  Never suspends, so it also works in a task that is being cancelled."""
        if self._ids and (self._open or self._failed):
            await self._client.abort(self._ids, internal=True)

    def begin(self, state: RequestState) -> None:
        """Sends the events with the role, once, before any others."""
        if self._first is not None:
            return
        self._first = state
        form = self.form
        if form.role is not None:
            chunk = form.chunk(choice := _ChatChoice(0, _Delta(form.role, "")))
            chunk.usage = form.usage_of(self._prompt_tokens, 0)
            chunk.prompt_token_ids, chunk.prompt_text = state.prompt_token_ids if form.token_ids else None, None
            for choice.index in range(form.n):
                self.sink.put(_event(chunk))

    def choice_ended(self, state: RequestState, tokens: int) -> None:
        """Counts an ended sequence; after the last one, ends the stream."""
        self._open -= 1
        self._completion_tokens += tokens
        if self._open:
            return
        if self.form.include_usage:
            self.sink.put(_event(self._usage_chunk(self._first or state)))
        self.sink.put(DONE)
        self.sink.end()

    def _usage_chunk(self, first: RequestState) -> _Chunk:
        prompt, completion, form = self._prompt_tokens, self._completion_tokens, self.form
        details = {"cached_tokens": first.num_cached_tokens}
        if form.role is not None:
            details["created_cache_tokens"] = first.num_cache_creation_tokens
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        known = {name: count for name, count in details.items() if count is not None}
        chunk = form.chunk()
        chunk.usage = detailed({**usage, "prompt_tokens_details": known})
        chunk.system_fingerprint = UNSET if form.fingerprint is None else form.fingerprint
        return chunk

    def fail(self, error: Exception) -> None:
        self._failed = True
        self.sink.end(error)


class ChoiceStream:
    """One sequence, from vLLM's output processor to the sink; takes the place of its output queue."""

    def __init__(self, stream: PlainStream, state: RequestState, index: int) -> None:
        self._stream = stream
        self._state = state
        self._delta = _Delta()
        is_chat = stream.form.role is not None
        self._choice = _ChatChoice(index, self._delta, token_ids=None) if is_chat else _TextChoice(index, "")
        self._chunk = stream.form.chunk(self._choice)
        """Made once: new text is put into it."""
        self._tokens = 0

    def put(self, error: Any) -> None:
        """The queue's method.  vLLM only calls it with errors, because `take` returns no outputs."""
        if isinstance(error, Exception):
            self._stream.fail(error)

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
        stream, state = self._stream, self._state
        if finish_reason is not None:
            # Breaks the reference cycle between state and choice.
            del state.make_request_output
        stream.begin(state)
        text = state.detokenizer.get_next_output_text(finish_reason is not None, True)
        if finish_reason is FinishReason.ERROR:
            stream.fail(GenerationError())
            return
        before = self._tokens
        self._tokens = tokens = before + len(new_token_ids)
        # Without tokens and text, only a part of a long prompt was computed.
        # With a parser, no text means no chunk, unless it has a finish reason or token ids.
        form = stream.form
        mute = form.sparse and not text
        if (tokens or text) and not (mute and finish_reason is None and not form.token_ids):
            choice, chunk = self._choice, self._chunk
            if isinstance(choice, _ChatChoice):
                self._delta.content = UNSET if mute else text
            else:
                choice.text = text
                choice.prompt_token_ids = state.prompt_token_ids if form.token_ids and not before else None
            if form.token_ids:
                choice.token_ids = new_token_ids
            chunk.usage = form.usage_of(state.prompt_len, tokens)
            if finish_reason is not None:
                choice.finish_reason, choice.stop_reason = str(finish_reason), stop_reason
                if form.fingerprint is not None and not form.include_usage:
                    chunk.system_fingerprint = form.fingerprint
            stream.sink.put(_event(chunk))
        if finish_reason is not None:
            if state.parent_req is not None:
                state.parent_req.child_requests.discard(state.request_id)
            stream.choice_ended(state, tokens)


def detailed(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer as OpenAI's clients know it: details that vLLM leaves out, or never counts, are 0."""
    return usage | {name: dict.fromkeys(all_of_it, 0) | (usage.get(name) or {}) for name, all_of_it in _DETAILS.items()}


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
