"""vLLM's request for a response, repaired."""

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
    """Its prompt is what the chat template wrote: vLLM's own puts the tokenizer's begin token before it a second time.

    Remove `build_tok_params` when vLLM's says `add_special_tokens=False`, as that of chat completions does; `_one_text` when
    vLLM reads more of an assistant's message than the text of its first part, which need not be there.
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
