"""Fixed responses: what one verification yields, and which requests cannot be honoured."""

from typing import Any

import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from backend.engine.worker.fixed import fixed_response, forced_row, refuse_unfit
from backend.wire.engine import FIXED_RESPONSE
from tests.support.properties import examples

few_tokens = st.lists(st.integers(0, 3), max_size=6)


@examples(30)
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
