"""vLLM's request model of OpenAI's Responses API, with repairs."""

from __future__ import annotations

import dataclasses
from typing import Self

import vllm  # noqa: F401  (first: its submodules do not import alone)
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from pydantic import model_validator
from vllm.config import ModelConfig
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers import TokenizeParams


class ResponseRequest(ResponsesRequest):
    """vLLM's model with two repairs.

    `build_tok_params`: vLLM adds the tokenizer's begin token a second time to what the chat template wrote.  Remove when vLLM
    says `add_special_tokens=False`, as for chat completions.  `_one_text`: vLLM reads only the text of an assistant message's
    first part, which may be missing.  Remove when vLLM reads all parts.
    """

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        for item in self.input if isinstance(self.input, list) else ():
            if isinstance(item, ResponseOutputMessage):
                text = "".join(part.text if isinstance(part, ResponseOutputText) else part.refusal for part in item.content)
                item.content = [ResponseOutputText(type="output_text", text=text, annotations=[])]
        return self

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return dataclasses.replace(super().build_tok_params(model_config), add_special_tokens=False)
