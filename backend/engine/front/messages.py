"""vLLM's serving class for Anthropic's API, with repairs of stream errors, truncated tool calls and thinking budgets."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import vllm  # noqa: F401  (first: its submodules do not import alone)
from starlette.requests import Request
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse

from backend.engine.front.reading import ReadsChats

_ERROR_PREFIX = 'data: {"error"'


class StreamFailed(Exception):
    """A stream from vLLM ended with this error object (`message`, `code`, `param`, ...)."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", "")))
        self.error = error


class Messages(ReadsChats, AnthropicServingMessages):
    """vLLM's class with three repairs; `tests/integration/test_gateway_messages.py` tests them."""

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Request | None = None) -> Any:
        """Drops a thinking budget, an upper bound, for a model that does not think; vLLM would refuse the request."""
        reasoning = self.engine_client.vllm_config.reasoning_config
        if reasoning is None or not reasoning.enabled:
            request.thinking_token_budget = None
        return await super().create_chat_completion(request, raw_request)

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Raises `StreamFailed` where vLLM's method would write an error event that lacks the kind of error."""
        failed: list[StreamFailed] = []

        async def watched() -> AsyncGenerator[str, None]:
            try:
                async for chunk in generator:
                    if chunk.startswith(_ERROR_PREFIX):
                        failed.append(StreamFailed(json.loads(chunk.removeprefix("data: "))["error"]))
                        raise failed[0]
                    yield chunk
            finally:
                await generator.aclose()

        events = super().message_stream_converter(watched())
        try:
            async for event in events:
                if failed:
                    raise failed[0]
                yield event
        finally:
            await events.aclose()

    def messages_full_converter(self, generator: ChatCompletionResponse) -> AnthropicMessagesResponse:
        """Drops arguments of a tool call that are no object, or that `max_tokens` cut off; vLLM's method would fail."""
        for call in generator.choices[0].message.tool_calls:
            try:
                whole = isinstance(json.loads(call.function.arguments), dict)
            except ValueError:
                whole = False
            if not whole:
                call.function.arguments = "{}"
        answer: AnthropicMessagesResponse = super().messages_full_converter(generator)
        return answer
