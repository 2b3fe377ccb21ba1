"""vLLM's request for a response, repaired."""

from __future__ import annotations

import dataclasses

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.config import ModelConfig
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers import TokenizeParams


class ResponseRequest(ResponsesRequest):
    """Its prompt is what the chat template wrote: vLLM's own puts the tokenizer's begin token before it a second time.

    Remove when `ResponsesRequest.build_tok_params` says `add_special_tokens=False`, as that of chat completions does.
    """

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return dataclasses.replace(super().build_tok_params(model_config), add_special_tokens=False)
