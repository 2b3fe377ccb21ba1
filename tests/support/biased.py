"""A verifier with a fault put in on purpose, which tests of exactness must find, and a custom logits processor.  Tests only."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from backend import noise
from backend.engine import sampling
from backend.engine.worker import OutriderCpuWorker
from backend.noise import Choice

TOO_LITTLE = 0.9
"""Of the noise that is due: likely tokens then come too often."""


class BiasedWorker(OutriderCpuWorker):
    """vLLM's CPU worker whose requests get too little noise."""

    def init_device(self) -> None:
        super().init_device()
        choose = noise.choose

        def choose_biased(logits: Any, seeds: Any, positions: Any, inverse_temperatures: Any, scales: Any) -> Choice:
            return choose(logits, seeds, positions, inverse_temperatures, TOO_LITTLE * scales)

        vars(sampling)["choose"] = choose_biased


class NoRepeat(AdapterLogitsProcessor):
    """A request with `no_repeat` in its extra arguments never says the last token twice in a row; depends on its output."""

    def is_argmax_invariant(self) -> bool:
        return False

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Anything goes."""

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("no_repeat"):
            return None

        def forbid_last(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if output:
                logits[output[-1]] = float("-inf")
            return logits

        return forbid_last
