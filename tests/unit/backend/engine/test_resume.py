"""Taking in requests that another verifier has begun, or whose responses are fixed: the parts that need no engine."""

import copy
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from backend.engine.resume import _advanced, _complete, acceptance_rule, continued_seed
from backend.engine.worker.fixed import fixed_response, forced_row, refuse_unfit
from backend.speculation.chances import Rule
from backend.wire.engine import FIXED_RESPONSE, RequestOptions
from tests.support.properties import examples


def test_a_continued_seed_is_another_one_each_time() -> None:
    seeds = {continued_seed(seed, emitted) for seed in range(20) for emitted in range(1, 20)}
    assert len(seeds) == 20 * 19
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert continued_seed(7, 5) == continued_seed(7, 5)


@pytest.mark.parametrize(
    ("params", "remote", "native"),
    [
        (SamplingParams(temperature=0, seed=1), Rule.GREEDY, Rule.GREEDY),
        (SamplingParams(temperature=1), Rule.INDEPENDENT, Rule.INDEPENDENT),
        (SamplingParams(temperature=1, seed=1), Rule.SHARED, Rule.INDEPENDENT),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="a*")), Rule.SHARED, Rule.INDEPENDENT),
        (None, Rule.GREEDY, Rule.GREEDY),
    ],
)
def test_the_rule_of_a_request(params: SamplingParams | None, remote: Rule, native: Rule) -> None:
    for shares_noise, rule in ((True, remote), (False, native)):
        own = copy.deepcopy(params)
        if own is not None:
            _complete(own, shares_noise, 0, RequestOptions())
        assert acceptance_rule(own) == rule


def advance(grammar: Any, start: int = 0) -> tuple[Any, SimpleNamespace]:
    structured = SimpleNamespace(reasoning_ended=None)
    request = SimpleNamespace(request_id="r", structured_output_request=structured)
    manager = SimpleNamespace(_get_constraint_bounds=lambda request, tokens, spec_tokens_committed: (start, start))
    return _advanced(manager, request, grammar, [1, 2, 3]), structured


def test_thoughts_are_not_the_grammars() -> None:
    grammar, structured = advance(Mock(), start=4)
    grammar.accept_tokens.assert_not_called()
    assert structured.reasoning_ended is None
    grammar, structured = advance(Mock(), start=2)
    grammar.accept_tokens.assert_called_once_with("r", [3])
    assert structured.reasoning_ended is True


def test_what_cannot_be_compiled_is_an_error_of_the_request() -> None:
    broken: Future[Any] = Future()
    broken.set_exception(RuntimeError("no grammar"))
    with pytest.raises(RuntimeError):
        advance(broken)


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
