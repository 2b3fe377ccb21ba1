"""Fixed responses: what one verification yields, and which requests cannot be honoured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from backend.engine.counting import Counters
from backend.engine.worker.fixed import FixedResponses, fixed_response, forced_row, refuse_unfit
from backend.fleet import VerifierStats
from backend.wire.engine import FIXED_RESPONSE

few_tokens = st.lists(st.integers(0, 3), max_size=6)


@given(fixed=st.lists(st.integers(0, 3), min_size=1, max_size=30), drafts=st.lists(few_tokens, min_size=30))
def test_steps_emit_the_response_and_never_more_than_agreed(fixed: list[int], drafts: list[list[int]]) -> None:
    emitted: list[int] = []
    for draft in drafts:
        row = forced_row(fixed, len(emitted), draft)
        agreed = 0
        for drafted, wanted in zip(draft, fixed[len(emitted) :], strict=False):
            if drafted != wanted:
                break
            agreed += 1
        assert len(row) == agreed + 1
        emitted.extend(row)
        if len(emitted) >= len(fixed):
            # The scheduler cuts what is behind `max_tokens`.
            emitted = emitted[: len(fixed)]
            break
    assert emitted == fixed


def request(prompt: int = 4, fixed: Any = (5, 6), **changes: Any) -> EngineCoreRequest:
    values = {"max_tokens": len(fixed) if isinstance(fixed, list | tuple) else 2, "ignore_eos": True} | changes
    fixed = list(fixed) if isinstance(fixed, tuple) else fixed
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * prompt,
        mm_features=None,
        sampling_params=SamplingParams(extra_args={FIXED_RESPONSE: fixed}, **values),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_a_fitting_request_passes() -> None:
    refuse_unfit(request(prompt=8), True, 10, 10)
    free = request()
    free.sampling_params = SamplingParams(max_tokens=3)
    refuse_unfit(free, False, 10, 10)
    assert fixed_response(free.sampling_params) is None
    assert fixed_response(request().sampling_params) == [5, 6]


@pytest.mark.parametrize(
    ("unfit", "allowed", "complaint"),
    [
        (request(), False, "takes no fixed responses"),
        (request(fixed=[], max_tokens=1), True, "one token or more"),
        (request(fixed="text"), True, "one token or more"),
        (request(fixed=["a", "b"]), True, "outside the vocabulary"),
        (request(fixed=[5, 10]), True, "outside the vocabulary"),
        (request(fixed=[5, -1]), True, "outside the vocabulary"),
        (request(prompt=9), True, "longer than the context of 10"),
        (request(max_tokens=3), True, "alone decides where it ends"),
        (request(ignore_eos=False), True, "alone decides where it ends"),
        (request(stop_token_ids=[5]), True, "alone decides where it ends"),
        (request(structured_outputs=StructuredOutputsParams(regex="a")), True, "alone decides where it ends"),
    ],
)
def test_what_cannot_be_exact_is_refused(unfit: EngineCoreRequest, allowed: bool, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        refuse_unfit(unfit, allowed, 10, 10)


def test_teacher_forced_verifications_are_no_drafters() -> None:
    counters = Counters(VerifierStats("v", 0.0, "sync", 4))
    counters.verification("drafter-0", 4, 2)
    counters.verification("drafter-0", 4, 3, teacher_forced=True)
    assert counters.stats.drafters["drafter-0"].accepted_tokens == 2
    assert counters.stats.teacher_forced.accepted_tokens == 3
    assert counters.stats.teacher_forced.accepted_by_position == [1, 1, 1, 0]


class Sampled:
    """What vLLM's runner makes of a step, as far as the mixin looks at it."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.sampled_token_ids = torch.tensor(rows, dtype=torch.int32)


class Runner:
    """Three requests: one fixed with a draft, one free, one fixed whose prompt is not done."""

    def __init__(self, rows: list[list[int]]) -> None:
        fixed = SamplingParams(extra_args={FIXED_RESPONSE: [7, 8, 9, 10]})
        params = {"fixed": fixed, "free": SamplingParams(), "chunk": fixed}
        self.input_batch = SimpleNamespace(req_ids=list(params))
        self.requests = {
            name: SimpleNamespace(sampling_params=each, output_token_ids=[7] if name == "fixed" else [])
            for name, each in params.items()
        }
        self.discard_request_mask = SimpleNamespace(np=np.array([False, False, True]))
        self.rows = rows

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Sampled:
        return Sampled(self.rows)


class Forcing(FixedResponses, Runner):
    """The mixin over it."""


def test_only_the_rows_of_fixed_responses_are_replaced() -> None:
    rows = [[3, -1, -1], [4, 5, -1], [6, -1, -1]]
    metadata = SimpleNamespace(draft_token_ids=torch.tensor([8, 2, 4, 5]), num_draft_tokens=[2, 2, 0])
    sampled = Forcing(rows)._sample(None, metadata).sampled_token_ids
    assert sampled.tolist() == [[8, 9, -1], rows[1], rows[2]]
    assert sampled.dtype == torch.int32


def test_without_drafts_the_next_token_is_the_responses() -> None:
    sampled = Forcing([[3], [4], [6]])._sample(None, None).sampled_token_ids
    assert sampled.tolist() == [[8], [4], [6]]
