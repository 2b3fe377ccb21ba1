"""A step without drafts is sampled plainly, one with drafts is verified; memory is measured for a row of each draft token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm  # noqa: F401  (must be the first of vLLM's modules)

from backend.engine.worker.runner import PlainUndraftedSteps, RemoteDrafting


class Runner:
    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return logits, spec_decode_metadata


class Mixed(PlainUndraftedSteps, Runner):
    pass


@pytest.mark.parametrize(("drafts", "verified"), [([0, 0], False), ([], False), ([0, 2], True), ([4], True)])
def test_the_rejection_sampler_sees_only_steps_with_drafts(drafts: list[int], verified: bool) -> None:
    metadata = SimpleNamespace(num_draft_tokens=drafts)
    assert Mixed()._sample("logits", metadata) == ("logits", metadata if verified else None)
    assert Mixed()._sample("logits", None) == ("logits", None)


def test_memory_is_measured_for_the_rows_of_all_draft_tokens() -> None:
    class Sampling:
        num_spec_tokens, max_num_tokens = 8, 30

        def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> int:
            return len(hidden_states)

    class Drafting(RemoteDrafting, Sampling):  # type: ignore[misc]
        pass

    runner: Any = Drafting()
    assert [runner._dummy_sampler_run(torch.zeros(requests, 2)) for requests in (2, 3, 4)] == [18, 27, 30]
