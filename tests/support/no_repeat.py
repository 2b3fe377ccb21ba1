"""A custom logits processor, for engines of tests."""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class NoRepeat(AdapterLogitsProcessor):
    """Forbids repeating the last token for requests with `no_repeat` in `extra_args`; it depends on the request's output."""

    def is_argmax_invariant(self) -> bool:
        return False

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Accepts any parameters."""

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("no_repeat"):
            return None

        def forbid_last(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if output:
                logits[output[-1]] = float("-inf")
            return logits

        return forbid_last
