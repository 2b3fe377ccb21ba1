"""vLLM's serving class for Anthropic's API, with repairs of stream errors, truncated tool calls and thinking budgets."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse

from backend.engine.front.reading import ReadsChats
from backend.engine.front.stream import RaisesErrors

_ARGUMENTS = '"type":"input_json_delta"'
"""Stands in the events with arguments of calls and in no others; in text, its quotes would be escaped."""


class Messages(RaisesErrors, ReadsChats, AnthropicServingMessages):
    """vLLM's class with four repairs; `tests/integration/test_gateway_messages.py` tests them."""

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Request | None = None) -> Any:
        """Drops a thinking budget, an upper bound, for a model that does not think; vLLM would refuse the request."""
        reasoning = self.engine_client.vllm_config.reasoning_config
        if reasoning is None or not reasoning.enabled:
            request.thinking_token_budget = None
        return await super().create_chat_completion(request, raw_request)

    async def message_stream_converter(self, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        """Raises what `generator`, a chat's stream, raises; vLLM's method would write an event that lacks the kind of error.

        The arguments of a call come as one event, when they are whole.  Clients read them while they come, and fail at what is
        no JSON; arguments that are no object, or that `max_tokens` cut off, are left out, which clients read as `{}`.
        """
        failed: list[Exception] = []

        async def watched() -> AsyncGenerator[Any, None]:
            try:
                async for chunk in generator:
                    yield chunk
            except Exception as error:
                failed.append(error)
                raise
            finally:
                await generator.aclose()

        events = super().message_stream_converter(watched())
        held: list[dict[str, Any]] = []
        try:
            async for event in events:
                if failed:
                    raise failed[0]
                if _ARGUMENTS in event:
                    held.append(json.loads(event.partition("data: ")[2]))
                    continue
                if held and event.startswith("event: content_block_stop"):
                    arguments = "".join(each["delta"]["partial_json"] for each in held)
                    if is_object(arguments):
                        held[0]["delta"]["partial_json"] = arguments
                        yield f"event: content_block_delta\ndata: {json.dumps(held[0], ensure_ascii=False)}\n\n"
                    held.clear()
                yield event
        finally:
            await events.aclose()

    def messages_full_converter(self, generator: ChatCompletionResponse) -> AnthropicMessagesResponse:
        """Drops arguments of a tool call that are no object, or that `max_tokens` cut off; vLLM's method would fail."""
        for call in generator.choices[0].message.tool_calls:
            if not is_object(call.function.arguments):
                call.function.arguments = "{}"
        answer: AnthropicMessagesResponse = super().messages_full_converter(generator)
        return answer


def is_object(text: str) -> bool:
    """Whether the arguments of a call are a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
