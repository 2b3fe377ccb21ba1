"""vLLM's request model of OpenAI's Responses API, with repairs."""

import dataclasses
from typing import Annotated, Any, Self

from openai.types.responses import (
    EasyInputMessageParam,
    ResponseCustomToolCallOutputParam,
    ResponseCustomToolCallParam,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response_input_item_param import FunctionCallOutput, Message
from pydantic import Discriminator, FailFast, Tag, model_validator
from vllm.config import ModelConfig
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers import TokenizeParams


def _type_of(item: Any) -> str:
    """Tells an item's model.  vLLM's validator has made models of an assistant's items where it could."""
    if not isinstance(item, dict):
        kind = "answer" if isinstance(item, ResponseOutputMessage) else str(getattr(item, "type", None))
    else:
        kind = str(item.get("type", "message"))
        kind = "said" if kind == "message" and item.get("role") == "assistant" else kind
    # No name of a field: it stays out of what errors call the place.
    return f"{kind} item"


InputItem = Annotated[
    Annotated[Message, Tag("message item")]
    | Annotated[EasyInputMessageParam, Tag("said item")]
    | Annotated[ResponseOutputMessage, Tag("answer item")]
    | Annotated[ResponseReasoningItem, Tag("reasoning item")]
    | Annotated[ResponseFunctionToolCall, Tag("function_call item")]
    | Annotated[FunctionCallOutput, Tag("function_call_output item")]
    | Annotated[ResponseCustomToolCallParam, Tag("custom_tool_call item")]
    | Annotated[ResponseCustomToolCallOutputParam, Tag("custom_tool_call_output item")],
    Discriminator(_type_of, "item_type", "The type of this item is not supported"),
]
"""The items that vLLM makes prompts of, each checked as what its type says.

vLLM's own union has 60 members and tries them all: 0.09 ms for an item, and seconds for one that is wrong.
"""


class ResponseRequest(ResponsesRequest):
    """vLLM's model with two repairs.

    `build_tok_params`: vLLM adds the tokenizer's begin token a second time to what the chat template wrote.  Remove when vLLM
    says `add_special_tokens=False`, as for chat completions.  `_one_text`: vLLM reads only the text of an assistant message's
    first part, which may be missing.  Remove when vLLM reads all parts.
    """

    input: Annotated[list[InputItem], FailFast()]

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        for item in self.input:
            if isinstance(item, ResponseOutputMessage):
                text = "".join(part.text if isinstance(part, ResponseOutputText) else part.refusal for part in item.content)
                item.content = [ResponseOutputText(type="output_text", text=text, annotations=[])]
        return self

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        # A prompt that is cut leaves room for the answer.
        room = self.max_output_tokens or 1
        return dataclasses.replace(super().build_tok_params(model_config), add_special_tokens=False, max_output_tokens=room)
