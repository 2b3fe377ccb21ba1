"""The tool call parser for models of unknown family.

A grammar makes the model write required or named calls as JSON; vLLM's base classes build the grammar and read the JSON.  With
`tool_choice` `auto`, the text stays text, because it is unknown how such a model writes a call.
"""

from collections.abc import Sequence

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.tool_parsers import ToolParser, ToolParserManager

from backend.engine.parsers import ANY_MODEL

MOST_CALLS = 16
"""Calls in one answer, at most.  A model that was not trained to call tools does not know when to stop."""


class AnyModelToolParser(ToolParser):
    """Finds no calls in free text."""

    def adjust_request(self, request: ChatCompletionRequest | ResponsesRequest) -> ChatCompletionRequest | ResponsesRequest:
        adjusted: ChatCompletionRequest | ResponsesRequest = super().adjust_request(request)
        if request.tools and request.tool_choice == "required":
            if isinstance(adjusted, ChatCompletionRequest):
                schema = getattr(adjusted.structured_outputs, "json", None)
            else:
                schema = getattr(getattr(adjusted.text, "format", None), "schema_", None)
            # There is no schema if the request has a structural tag of its own.
            if isinstance(schema, dict):
                schema.setdefault("maxItems", MOST_CALLS)
        return adjusted

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        return DeltaMessage(content=delta_text)


ToolParserManager.register_module(name=ANY_MODEL, module=AnyModelToolParser)
