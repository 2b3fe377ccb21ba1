"""vLLM's OpenAI serving objects over a `FleetClient`, built once per gateway.

They get no request logger, so prompts and outputs stay out of the logs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import vllm  # noqa: F401  (first: its submodules do not import alone)
from openai.types.responses import ResponseContentPartDoneEvent, ResponseOutputText
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMClientError
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

from backend.config import Settings
from backend.engine.front import any_model  # noqa: F401  (registers itself)
from backend.engine.front.client import FleetClient
from backend.engine.front.deferred import deferred
from backend.engine.front.logprobs import Marked, TokensLogprobs, Unshown, likeliest
from backend.engine.front.messages import Messages, StreamFailed
from backend.engine.front.plain import Chat, ChatOfMany, Completion
from backend.engine.front.pooling import Pooling
from backend.engine.front.reading import read_contexts, reading
from backend.engine.parsers import tool_parser


class _NoTracebackForTheExpected(logging.Filter):
    """Drops vLLM's tracebacks of streams that ended early for an expected reason: a lost verifier, a bad request."""

    def __init__(self, expected: type[Exception]) -> None:
        super().__init__()
        self._expected = (expected, StreamFailed, VLLMClientError)

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], self._expected))


FEW_LOGPROBS = 5_000
"""Log probabilities, tokens times alternatives, that the event loop can make and serialize in some 50 ms."""


class Tokens(TokensLogprobs, ServingTokens):
    """vLLM's serving class, except that an answer with log probabilities is a `Deferred`."""

    async def serve_tokens_full_generator(self, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer, or a `Deferred` that will make it."""
        full = super().serve_tokens_full_generator
        if request.sampling_params.logprobs is None and request.sampling_params.prompt_logprobs is None:
            return await full(request, result_generator, *args, **kwargs)
        return await deferred([result_generator], lambda results: full(request, results, *args, **kwargs))


class Responses(OpenAIServingResponses):
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
        unshown, contexts = Unshown(), read_contexts(result_generator, request, sampling_params)
        marked = unshown.contexts(contexts)
        made = super()._process_simple_streaming_events(request, sampling_params, marked, *args, **kwargs)
        return unshown.events(made)

    def _create_response_logprobs(self, token_ids: Any, logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logprobs, Marked):
            token_ids, logprobs = logprobs.unshown.take(token_ids, logprobs)
        return super()._create_response_logprobs(token_ids, logprobs, *args, **kwargs)

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
    pooling: Pooling


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
    tools = tool_parser(settings.gateway.tool_call_parser, model_dir, settings.gateway.chat_template)
    adapters = [LoRAModulePath(name, path) for name, path in settings.verifier.adapters.items()]
    # Clients see `model_path` as a model's `root`.  It must not reveal the directory that holds the model.
    names = [BaseModelPath(name=name, model_path=served_names[0]) for name in served_names]
    models = OpenAIServingModels(client, names, lora_modules=adapters)
    common: dict[str, Any] = {
        "request_logger": None,
        "chat_template": template,
        "chat_template_content_format": "auto",
    }
    parsing: dict[str, Any] = {
        "enable_auto_tools": tools is not None,
        "tool_parser": tools,
        "reasoning_parser": client.vllm_config.structured_outputs_config.reasoning_parser,
    }
    renderer = OnlineRenderer(model_config=client.model_config, renderer=client.renderer, **parsing, **common)
    renderer.parser = reading(renderer.parser)
    counted: dict[str, Any] = {"enable_prompt_tokens_details": True}
    chatting: dict[str, Any] = {"online_renderer": renderer, **counted, **parsing, **common}
    services = Services(
        models=models,
        chat=Chat(client, models, "assistant", **chatting),
        chat_of_many=ChatOfMany(client, models, "assistant", **chatting),
        completion=Completion(client, models, online_renderer=renderer, request_logger=None, **counted),
        responses=Responses(client, models, **chatting),
        messages=Messages(client, models, "assistant", **chatting),
        tokens=Tokens(client, models, renderer, request_logger=None, **counted),
        tokenization=ServingTokenization(models, renderer, **common),
        renderer=renderer,
        pooling=Pooling(client, models, template),
    )
    if (limit := settings.gateway.default_max_tokens) is not None:
        for serving in (services.chat, services.chat_of_many, services.responses):
            serving.default_sampling_params = {**serving.default_sampling_params, "max_tokens": limit}
    return services
