"""Plain streams: text without tools, reasoning, logprobs or echo, as most clients ask for.  Gateway's event loop.

vLLM's serving classes check and render the request; its output processor detokenizes and finds stop strings.  Only their work
per chunk (a `RequestOutput`, a queue, three generators, pydantic) is replaced: new text goes from the output processor into an
event as bytes.  All other streams are vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Protocol

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionStreamResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat, _make_prompt_tokens_details
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionStreamResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import GenerationError
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

from backend.engine.front.chunks import Template, chat_template, completion_template, to_json
from backend.engine.front.client import FleetClient, Submit, submissions
from backend.engine.front.deferred import Deferred, deferred
from backend.engine.front.logprobs import ChatLogprobs, with_prompt_logprobs
from backend.engine.front.reading import ReadsChats
from backend.engine.front.usage import last_chunk, streamed

DONE = b"data: [DONE]\n\n"


class Sink(Protocol):
    """Where a stream's events go."""

    def put(self, events: bytes) -> None:
        """Takes one or more complete events."""
        ...

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream: it is complete, or failed with `error`."""
        ...


class Form:
    """The templates of a stream's chunks, and the values that all chunks share.

    `sparse`: a chunk without text is left out, or has no content.
    """

    def __init__(
        self, request: Any, template: Callable[..., Template], fingerprint: str | None, sparse: bool = False, **common: Any
    ) -> None:
        self.include_usage, self.usage = should_include_usage(request.stream_options, False)
        self.token_ids = bool(request.return_token_ids)
        self.n = request.n or 1
        self.sparse = sparse
        self._template = template
        # Only the last event has the fingerprint; that is the usage event, if usage was asked for.
        self._options = {
            "token_ids": self.token_ids,
            "usage": self.usage,
            "fingerprint": None if self.include_usage else fingerprint,
        }
        self._common = common

    def fill(self, kind: str, values: dict[str, Any], **mute: bool) -> bytes:
        """A template filled with the shared values and `values`."""
        return self._template(kind, **self._options, **mute).fill(self._common | values)


class PlainStream:
    """One request's stream.  `start` submits the sequences; then the sink gets events as vLLM processes their outputs."""

    def __init__(
        self,
        client: FleetClient[Any],
        submit: list[Submit],
        form: Form,
        *,
        role: str | None,
        last: Callable[[UsageInfo, RequestState], str],
    ) -> None:
        self._client = client
        self._submit = submit
        self._last = last
        self._ids: list[str] = []
        self._open = 0
        self._first: RequestState | None = None
        self._failed = False
        self._prompt_tokens = self._completion_tokens = 0
        self._role = role
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
                choice = Choice(self, state, prompt * self.form.n + state.request_index)
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
        if self._role is not None:
            asked = state.prompt_token_ids if self.form.token_ids else None
            values = {"role": self._role, "prompt_tokens": self._prompt_tokens, "prompt_token_ids": asked}
            for index in range(self.form.n):
                self.sink.put(self.form.fill("role", values | {"index": index}) % ())

    def choice_ended(self, state: RequestState, tokens: int) -> None:
        """Counts an ended sequence; after the last one, ends the stream."""
        self._open -= 1
        self._completion_tokens += tokens
        if self._open:
            return
        if self.form.include_usage:
            prompt, completion = self._prompt_tokens, self._completion_tokens
            usage = UsageInfo(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
            self.sink.put(b"data: %b\n\n" % self._last(usage, self._first or state).encode())
        self.sink.put(DONE)
        self.sink.end()

    def fail(self, error: Exception) -> None:
        self._failed = True
        self.sink.end(error)


class Choice:
    """One sequence, from vLLM's output processor to the sink; takes the place of its output queue."""

    def __init__(self, stream: PlainStream, state: RequestState, index: int) -> None:
        form = stream.form
        prompt_tokens = state.prompt_len
        self._stream = stream
        self._state = state
        self._values = {"index": index, "prompt_tokens": prompt_tokens}
        self._prompt_token_ids = state.prompt_token_ids if form.token_ids else None
        self._text = form.fill("text", self._values)
        self._more = form.token_ids or form.usage
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
        said = self._tokens
        self._tokens = tokens = said + len(new_token_ids)
        # Without tokens and text, only a part of a long prompt was computed.
        # With a parser, no text means no chunk, unless it has a finish reason or token ids.
        mute = stream.form.sparse and not text
        if (tokens or text) and not (mute and finish_reason is None and not stream.form.token_ids):
            form = self._text
            values = {b"text": to_json(text)}
            if finish_reason is not None or mute:
                kind = "text" if finish_reason is None else "end"
                form = stream.form.fill(kind, self._values, **({"mute": True} if mute else {}))
            if finish_reason is not None:
                values[b"finish_reason"] = to_json(str(finish_reason))
                values[b"stop_reason"] = to_json(stop_reason)
            if self._more:
                values[b"token_ids"] = to_json(new_token_ids)
                values[b"prompt_token_ids"] = to_json(None if said else self._prompt_token_ids)
                values[b"completion_tokens"] = b"%d" % tokens
                values[b"total_tokens"] = b"%d" % (state.prompt_len + tokens)
            stream.sink.put(form % values)
        if finish_reason is not None:
            if state.parent_req is not None:
                state.parent_req.child_requests.discard(state.request_id)
            stream.choice_ended(state, tokens)


def _is_parsed(parser: type[Parser] | None, request: Any) -> bool:
    """Whether vLLM's parsers could turn a chat's text into anything but content."""
    if parser is None:
        return False
    tools = parser.tool_parser_cls
    return (
        not issubclass(parser, DelegatingParser)
        or parser.reasoning_parser_cls is not None
        or request.tool_choice != "none"
        or not request.include_reasoning
        or (tools is not None and tools.engine_based_streaming)
    )


def _asks_logprobs(request: Any) -> bool:
    # `logprobs` is a bool in chats, a number in completions, where 0 asks too.
    own = request.logprobs not in (None, False) or type(request.logprobs) is int
    return own or request.prompt_logprobs is not None


def is_plain(serving: Any, request: Any) -> bool:
    """Whether, with this server's configuration, a request's stream holds nothing but text."""
    return not (
        _asks_logprobs(request)
        or request.echo
        or request.use_beam_search
        or request.stream_interval not in (None, 1)
        or getattr(request, "return_prompt_text", False)
        or _is_parsed(getattr(serving, "parser_cls", None), request)
        or serving.engine_client.observability_config.per_request_spec_decode_metrics != "none"
        or serving.engine_client.output_processor.stream_interval > 1
    )


def _dump(serving: Any, chunk: Any, usage: UsageInfo, **dump: bool) -> str:
    chunk.usage = usage
    chunk.system_fingerprint = serving.system_fingerprint
    return last_chunk(chunk.model_dump_json(exclude_none=True, **dump))


class ChatOfMany(ChatLogprobs, ReadsChats, OpenAIServingChatBatch):
    """vLLM's chat completions of several conversations in one request."""

    async def chat_completion_full_generator_batch(self, request: Any, generators: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        full = super().chat_completion_full_generator_batch
        if not request.logprobs:
            return await full(request, generators, *args, **kwargs)
        return await deferred(generators, lambda *results: full(request, list(results), *args, **kwargs))


class Chat(ChatLogprobs, ReadsChats, OpenAIServingChat):
    """vLLM's chat completions, with a `PlainStream` where one was offered (`client.offer_plain`) and suffices."""

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: Any,
        request_id: str,
        model_name: str,
        *args: Any,
        mm_token_counts: dict[str, int] | None = None,
        **kwargs: Any,
    ) -> PlainStream | AsyncGenerator[str, None]:
        """vLLM's stream, or a plain one."""
        submit = submissions()
        if submit is None or not is_plain(self, request):
            stream: AsyncGenerator[str, None] = super().chat_completion_stream_generator(
                request, result_generator, request_id, model_name, *args, mm_token_counts=mm_token_counts, **kwargs
            )
            return streamed(stream)
        created = int(time.time())

        def last(usage: UsageInfo, state: RequestState) -> str:
            usage.prompt_tokens_details = _make_prompt_tokens_details(
                self.enable_prompt_tokens_details, state.num_cached_tokens, state.num_cache_creation_tokens, mm_token_counts
            )
            chunk = ChatCompletionStreamResponse(
                id=request_id, object="chat.completion.chunk", created=created, choices=[], model=model_name
            )
            return _dump(self, chunk, usage, exclude_unset=True)

        # If there is no text, vLLM with a parser sends no chunk, or one without content.
        sparse = self.parser_cls is not None
        common = {"id": request_id, "created": created, "model": model_name}
        form = Form(request, chat_template, self.system_fingerprint, sparse, **common)
        return PlainStream(self.engine_client, submit, form, role=self.get_chat_request_role(request), last=last)

    async def chat_completion_full_generator(self, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        full = super().chat_completion_full_generator
        if not _asks_logprobs(request):
            return await full(request, result_generator, *args, **kwargs)
        return await deferred([result_generator], lambda results: full(request, results, *args, **kwargs))


class Completion(OpenAIServingCompletion):
    """vLLM's completions, with a `PlainStream` where one was offered and suffices."""

    def request_output_to_completion_response(self, outputs: Any, request: Any, *args: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        make = partial(super().request_output_to_completion_response, outputs, request, *args)
        return Deferred(make, outputs) if _asks_logprobs(request) and not request.stream else make()

    def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: Any,
        result_generator: Any,
        request_id: str,
        created_time: int,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> PlainStream | AsyncGenerator[str, None]:
        """vLLM's stream, or a plain one."""
        submit = submissions()
        if submit is None or not is_plain(self, request):
            if request.echo:
                result_generator = with_prompt_logprobs(result_generator)
            stream: AsyncGenerator[str, None] = super().completion_stream_generator(
                request, engine_inputs, result_generator, request_id, created_time, model_name, *args, **kwargs
            )
            return streamed(stream)

        def last(usage: UsageInfo, state: RequestState) -> str:
            if self.enable_prompt_tokens_details:
                usage.prompt_tokens_details = PromptTokenUsageInfo(cached_tokens=state.num_cached_tokens)
            chunk = CompletionStreamResponse(id=request_id, created=created_time, model=model_name, choices=[])
            return _dump(self, chunk, usage, exclude_unset=False)

        form = Form(
            request, completion_template, self.system_fingerprint, id=request_id, created=created_time, model=model_name
        )
        return PlainStream(self.engine_client, submit, form, role=None, last=last)
