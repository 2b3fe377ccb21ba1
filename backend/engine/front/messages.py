"""vLLM's Anthropic serving, so that errors keep what they are and a call cut short is still an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

_ERROR_PREFIX = 'data: {"error"'


class StreamFailed(Exception):
    """A stream of vLLM's ended with this error object (`message`, `code`, `param`, ...)."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", "")))
        self.error = error


class Messages(AnthropicServingMessages):
    """vLLM's own, with two repairs; each is checked by a test in `tests/integration/test_gateway_messages.py`."""

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Raises `StreamFailed` where vLLM's would write an error event that says nothing of the kind of error."""
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
        """A call whose arguments were cut off by `max_tokens` is shown without them; vLLM's would fail."""
        for call in generator.choices[0].message.tool_calls:
            try:
                json.loads(call.function.arguments)
            except ValueError:
                call.function.arguments = "{}"
        answer: AnthropicMessagesResponse = super().messages_full_converter(generator)
        return answer
