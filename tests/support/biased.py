"""A verifier with a deliberate fault that tests of exactness must find, and a custom logits processor.  Tests only."""

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
"""Factor on the noise: with less than the correct noise, likely tokens are drawn too often."""


class BiasedWorker(OutriderCpuWorker):
    """The CPU worker, with too little noise for every request."""

    def init_device(self) -> None:
        super().init_device()
        choose = noise.choose

        def choose_biased(logits: Any, seeds: Any, positions: Any, inverse_temperatures: Any, scales: Any) -> Choice:
            return choose(logits, seeds, positions, inverse_temperatures, TOO_LITTLE * scales)

        vars(sampling)["choose"] = choose_biased


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
