"""A verifier with a fault put in on purpose: it accepts every tenth first draft token without asking the target.

What the tests of exactness must be able to find.  Tests only.
"""

from __future__ import annotations

from typing import Any

import torch

from backend.verifier.worker import OutriderCpuWorker

ACCEPTED_UNASKED = 0.1


class BiasedRunner:
    """Mixin over the runner: spoils the sampler's output."""

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if spec_decode_metadata is None:
            return output
        tokens, at = output.sampled_token_ids, 0
        for row, drafted in enumerate(spec_decode_metadata.num_draft_tokens):
            if drafted and torch.rand(()) < ACCEPTED_UNASKED:
                tokens[row, 0] = spec_decode_metadata.draft_token_ids[at]
            at += drafted
        return output


class BiasedWorker(OutriderCpuWorker):
    """vLLM's CPU worker with the fault."""

    def init_device(self) -> None:
        super().init_device()
        runner = type(self.model_runner)
        self.model_runner.__class__ = type(f"Biased{runner.__name__}", (BiasedRunner, runner), {})
