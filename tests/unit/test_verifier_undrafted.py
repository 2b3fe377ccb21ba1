"""A step without drafts is sampled plainly and needs no table of drafts, one with drafts is verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm  # noqa: F401  (must be the first of vLLM's modules)

from backend.engine.runner import UndraftedSteps


class Runner:
    device = torch.device("cpu")

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return logits, spec_decode_metadata

    def _calc_spec_decode_metadata(self, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        return "vLLM's"


class Mixed(UndraftedSteps, Runner):
    pass


@pytest.mark.parametrize(("drafts", "verified"), [([0, 0], False), ([], False), ([0, 2], True), ([4], True)])
def test_the_rejection_sampler_sees_only_steps_with_drafts(drafts: list[int], verified: bool) -> None:
    metadata = SimpleNamespace(num_draft_tokens=drafts)
    assert Mixed()._sample("logits", metadata) == ("logits", metadata if verified else None)
    assert Mixed()._sample("logits", None) == ("logits", None)


def test_without_drafts_the_last_row_of_each_request_is_sampled() -> None:
    assert Mixed()._calc_spec_decode_metadata(np.array([0, 2], np.int32), np.array([1, 4], np.int32)) == "vLLM's"
    metadata = Mixed()._calc_spec_decode_metadata(np.zeros(3, np.int32), np.array([1, 8, 9], np.int32))
    assert metadata.logits_indices.tolist() == [0, 7, 8]
    assert metadata.num_draft_tokens == [0, 0, 0]
    assert metadata.max_spec_len == 0
    assert metadata.bonus_logits_indices.tolist() == [0, 1, 2]
    assert metadata.cu_num_sampled_tokens.tolist() == [1, 2, 3]
    assert metadata.draft_token_ids.numel() == metadata.target_logits_indices.numel() == 0
