"""vLLM's OpenAI serving objects over a `FleetClient`, built once per gateway.

They get no request logger, so prompts and outputs stay out of the logs.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai.types.responses import ResponseContentPartDoneEvent, ResponseOutputText
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import VLLMClientError
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_derenderer import OnlineDerenderer
from vllm.renderers.online_renderer import OnlineRenderer

from backend.config import Settings
from backend.engine.front import any_model  # noqa: F401  (registers itself)
from backend.engine.front.client import FleetClient, submissions
from backend.engine.front.deferred import Deferred, deferred
from backend.engine.front.logprobs import ChatLogprobs, TokensLogprobs, likeliest, repeat_prompt_logprobs
from backend.engine.front.messages import Messages
from backend.engine.front.pooling import PoolingServing
from backend.engine.front.reading import ReadsChats, read_contexts, reading
from backend.engine.front.stream import Form, PlainStream, RaisesErrors, streamed
from backend.engine.parsers import TOOLS, parser_of


class _NoTracebackForTheExpected(logging.Filter):
    """Drops vLLM's tracebacks of streams that ended early for an expected reason: a lost verifier, a bad request."""

    def __init__(self, expected: type[Exception]) -> None:
        super().__init__()
        self._expected = (expected, VLLMClientError)

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], self._expected))


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
    """Whether, with this server's configuration, a request's stream holds nothing but the text of one answer to each prompt."""
    _, counts_always = should_include_usage(request.stream_options, False)
    return not (
        counts_always
        or request.n not in (None, 1)
        or _asks_logprobs(request)
        or request.return_token_ids
        or request.echo
        or request.use_beam_search
        or request.stream_interval not in (None, 1)
        or getattr(request, "return_prompt_text", False)
        or getattr(request, "return_weight_versions", False)
        or _is_parsed(getattr(serving, "parser_cls", None), request)
        or serving.engine_client.observability_config.per_request_spec_decode_metrics != "none"
        or serving.engine_client.output_processor.stream_interval > 1
    )


def _form(
    serving: Any, request: Any, request_id: str, created: int, model: str, role: str | None = None, sparse: bool = False
) -> Form:
    include_usage, _ = should_include_usage(request.stream_options, False)
    return Form(request_id, created, model, serving.system_fingerprint, role, include_usage, sparse)


class ChatOfMany(ChatLogprobs, ReadsChats, OpenAIServingChatBatch):
    """vLLM's chat completions of several conversations in one request."""

    async def chat_completion_full_generator_batch(self, request: Any, generators: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        full = super().chat_completion_full_generator_batch
        if not request.logprobs:
            return await full(request, generators, *args, **kwargs)
        return await deferred(generators, lambda *results: full(request, list(results), *args, **kwargs))


class ServingChat(RaisesErrors, ChatLogprobs, ReadsChats, OpenAIServingChat):
    """vLLM's chat completions, with a `PlainStream` where one is allowed (`client.submissions`) and suffices."""

    def chat_completion_stream_generator(
        self, request: ChatCompletionRequest, result_generator: Any, request_id: str, model_name: str, *args: Any, **kwargs: Any
    ) -> PlainStream | AsyncGenerator[str, None]:
        """vLLM's stream, or a plain one."""
        submit = submissions.get()
        if submit is None or not is_plain(self, request):
            stream: AsyncGenerator[str, None] = super().chat_completion_stream_generator(
                request, result_generator, request_id, model_name, *args, **kwargs
            )
            return streamed(stream)
        # If there is no text, vLLM with a parser sends no chunk, or one without content.
        role, sparse = self.get_chat_request_role(request), self.parser_cls is not None
        return PlainStream(
            self.engine_client, submit[0], _form(self, request, request_id, int(time.time()), model_name, role, sparse)
        )

    async def chat_completion_full_generator(self, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        full = super().chat_completion_full_generator
        if not _asks_logprobs(request):
            return await full(request, result_generator, *args, **kwargs)
        return await deferred([result_generator], lambda results: full(request, results, *args, **kwargs))


class ServingCompletion(RaisesErrors, OpenAIServingCompletion):
    """vLLM's completions, with a `PlainStream` where one is allowed and suffices."""

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
        submit = submissions.get()
        if submit is None or len(submit) > 1 or not is_plain(self, request):
            if request.echo:
                result_generator = repeat_prompt_logprobs(result_generator)
            stream: AsyncGenerator[str, None] = super().completion_stream_generator(
                request, engine_inputs, result_generator, request_id, created_time, model_name, *args, **kwargs
            )
            return streamed(stream)

        return PlainStream(self.engine_client, submit[0], _form(self, request, request_id, created_time, model_name))


FEW_LOGPROBS = 5_000
"""Log probabilities, tokens times alternatives, that the event loop can make and serialize in some 50 ms."""


class ServingTokensWithLogprobs(RaisesErrors, TokensLogprobs, ServingTokens):
    """vLLM's serving class, except that an answer with log probabilities is a `Deferred`."""

    async def serve_tokens_full_generator(self, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        full = super().serve_tokens_full_generator
        if request.sampling_params.logprobs is None and request.sampling_params.prompt_logprobs is None:
            return await full(request, result_generator, *args, **kwargs)
        return await deferred([result_generator], lambda results: full(request, results, *args, **kwargs))


class ServingResponses(RaisesErrors, OpenAIServingResponses):
    """vLLM's serving class with four differences.

    An answer that was aborted is `incomplete`, not `completed` or `cancelled`.  A whole answer with more than
    `FEW_LOGPROBS` is a `Deferred`; the last events of such a stream, which repeat the whole text, have none.
    Parsers read token by token.  In a stream, log probabilities of tokens without text come with the next text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: type[Parser] | None = reading(self.parser)

    def _process_simple_streaming_events(
        self, request: Any, sampling_params: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        contexts = read_contexts(result_generator, request, sampling_params)
        return super()._process_simple_streaming_events(request, sampling_params, contexts, *args, **kwargs)

    def _topk_logprobs(self, logprobs: Any, top_logprobs: int, *args: Any, **kwargs: Any) -> Any:
        return super()._topk_logprobs(likeliest(logprobs, top_logprobs), top_logprobs, *args, **kwargs)

    async def responses_full_generator(
        self, request: Any, sampling_params: Any, result_generator: Any, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's answer, a `Deferred` that will make it, or the end of vLLM's stream."""
        full, is_simple = super().responses_full_generator, isinstance(context, SimpleContext)

        async def answer(results: Any) -> Any:
            made = await full(request, sampling_params, results, context, *args, **kwargs)
            ended = context.final_output.outputs[0] if is_simple and context.final_output else context
            if isinstance(made, ResponsesResponse) and getattr(ended, "finish_reason", None) == "abort":
                made.status = "incomplete"
            return made

        async def outputs() -> AsyncGenerator[Any, None]:
            yield context.final_output

        if request.stream or not is_simple or not request.is_include_output_logprobs():
            return await answer(result_generator)
        async for _ in result_generator:
            pass
        return await (deferred([outputs()], answer) if _are_many(request, context) else answer(outputs()))

    async def responses_stream_generator(
        self, request: Any, sampling_params: Any, result_generator: Any, context: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """vLLM's events."""
        made = super().responses_stream_generator(request, sampling_params, result_generator, context, *args, **kwargs)
        many = False
        async with aclosing(made) as events:
            async for each in events:
                many = many or (isinstance(context, SimpleContext) and _are_many(request, context))
                if many:
                    context._accumulated_logprobs.clear()
                if many and isinstance(each, ResponseContentPartDoneEvent) and isinstance(each.part, ResponseOutputText):
                    # The two events that follow have the same part.
                    logprobs, each.part.logprobs = each.part.logprobs or [], None
                    for token in logprobs:
                        token.top_logprobs.clear()
                        await asyncio.sleep(0)
                yield each


def _are_many(request: Any, context: SimpleContext) -> bool:
    alternatives: int = request.top_logprobs + 1
    return len(context._accumulated_logprobs) * alternatives > FEW_LOGPROBS


@dataclass(frozen=True)
class Services:
    """The serving objects that the routes call."""

    models: OpenAIServingModels
    chat: OpenAIServingChat
    chat_of_many: ChatOfMany
    completion: OpenAIServingCompletion
    responses: OpenAIServingResponses
    messages: Messages
    tokens: ServingTokens
    tokenization: ServingTokenization
    renderer: OnlineRenderer
    pooling: PoolingServing


def build_services(
    client: FleetClient[Any], settings: Settings, served_names: Sequence[str], expected: type[Exception]
) -> Services:
    """The serving objects for one base model under `served_names`; answers carry the first name.

    Errors of class `expected` get no traceback in the log.  Raises `TypeError` for a parser that does not fit the tokenizer.
    """
    for serving in (OpenAIServingChat, OpenAIServingCompletion, OpenAIServingResponses, Messages.__base__, ServingTokens):
        vllm_logger = logging.getLogger(serving.__module__)
        if not any(isinstance(each, _NoTracebackForTheExpected) for each in vllm_logger.filters):
            vllm_logger.addFilter(_NoTracebackForTheExpected(expected))
    template = load_chat_template(settings.gateway.chat_template)
    model_dir = client.model_config.model
    tools = parser_of(TOOLS, settings.gateway.tool_call_parser, model_dir, settings.gateway.chat_template)
    adapters = [LoRAModulePath(name, path) for name, path in settings.verifier.adapters.items()]
    # Clients see `model_path` as a model's `root`.  It must not reveal the directory that holds the model.
    names = [BaseModelPath(name=name, model_path=served_names[0]) for name in served_names]
    models = OpenAIServingModels(client, names, lora_modules=adapters)
    common: dict[str, Any] = {"request_logger": None, "chat_template": template, "chat_template_content_format": "auto"}
    parsing: dict[str, Any] = {
        "enable_auto_tools": tools is not None,
        "tool_parser": tools,
        "reasoning_parser": client.vllm_config.structured_outputs_config.reasoning_parser,
    }
    renderer = OnlineRenderer(model_config=client.model_config, renderer=client.renderer, **parsing, **common)
    renderer.parser = reading(renderer.parser)
    counted: dict[str, Any] = {"enable_prompt_tokens_details": True}
    derendering: dict[str, Any] = {}
    if "online_derenderer" in inspect.signature(ServingTokens).parameters:  # vLLM 0.33
        derenderer = OnlineDerenderer(model_config=client.model_config, renderer=client.renderer, **parsing, **common)
        derendering = {"online_derenderer": derenderer}
    chatting: dict[str, Any] = {"online_renderer": renderer, **counted, **parsing, **common}
    return Services(
        models=models,
        chat=ServingChat(client, models, "assistant", **chatting),
        chat_of_many=ChatOfMany(client, models, "assistant", **chatting),
        completion=ServingCompletion(client, models, online_renderer=renderer, request_logger=None, **counted),
        responses=ServingResponses(client, models, **chatting),
        messages=Messages(client, models, "assistant", **chatting),
        tokens=ServingTokensWithLogprobs(client, models, renderer, request_logger=None, **counted, **derendering),
        tokenization=ServingTokenization(models, renderer, **common),
        renderer=renderer,
        pooling=PoolingServing(client, models, template),
    )
