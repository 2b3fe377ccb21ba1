"""A step without drafts is sampled plainly, one with drafts is verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)

from backend.engine.runner import UndraftedSteps


class Runner:
    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return logits, spec_decode_metadata


class Mixed(UndraftedSteps, Runner):
    pass


@pytest.mark.parametrize(("drafts", "verified"), [([0, 0], False), ([], False), ([0, 2], True), ([4], True)])
def test_the_rejection_sampler_sees_only_steps_with_drafts(drafts: list[int], verified: bool) -> None:
    metadata = SimpleNamespace(num_draft_tokens=drafts)
    assert Mixed()._sample("logits", metadata) == ("logits", metadata if verified else None)
    assert Mixed()._sample("logits", None) == ("logits", None)
