"""Taking in requests that another verifier has begun, or whose responses are fixed: the parts that need no engine."""

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from backend.engine.resume import add_request, continued_seed
from backend.engine.worker.fixed import fixed_response, forced_row, refuse_unfit
from backend.speculation.chances import Rule
from backend.wire.engine import FIXED_RESPONSE
from tests.support.properties import examples


def test_a_continued_seed_is_another_one_each_time() -> None:
    seeds = {continued_seed(seed, emitted) for seed in range(20) for emitted in range(1, 20)}
    assert len(seeds) == 20 * 19
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert continued_seed(7, 5) == continued_seed(7, 5)


def added(params: SamplingParams | None, shares_noise: bool = True, grammar: Any = None, start: int = 0) -> Any:
    """The request that vLLM's core gets, with a grammar behind three tokens.  The grammar begins with token `start`."""
    core, structured = Mock(), SimpleNamespace(_grammar=grammar, reasoning_ended=None)
    core.vllm_config.additional_config = {"outrider": {"shared_noise": shares_noise}}
    core.vllm_config.model_config = Mock(max_model_len=100, get_vocab_size=lambda: 100)
    core.structured_output_manager.executor = ThreadPoolExecutor(1)
    core.structured_output_manager._get_constraint_bounds.return_value = start, start
    made = Mock(request_id="r", sampling_params=params, use_structured_output=True, structured_output_request=structured)
    core.preprocess_add_request.return_value = made, 0
    request: Any = SimpleNamespace(sampling_params=params, prompt_token_ids=[1], prompt_embeds=None)
    add_request(core, request, [] if grammar is None else [1, 2, 3])
    core.add_request.assert_called_once_with(made, 0)
    return made


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
        assert added(copy.deepcopy(params), shares_noise).outrider.rule == rule


@pytest.mark.parametrize(("start", "accepted", "ended"), [(4, [], None), (2, [call("r", [3])], True)])
def test_thoughts_are_not_the_grammars(start: int, accepted: list[Any], ended: bool | None) -> None:
    grammar = Mock()
    structured = added(SamplingParams(), grammar=grammar, start=start).structured_output_request
    assert structured.grammar.result() is grammar
    assert grammar.accept_tokens.mock_calls == accepted
    assert structured.reasoning_ended is ended


def test_what_cannot_be_compiled_is_an_error_of_the_request() -> None:
    broken: Future[Any] = Future()
    broken.set_exception(RuntimeError("no grammar"))
    grammar = added(SamplingParams(), grammar=broken).structured_output_request.grammar
    with pytest.raises(RuntimeError, match="no grammar"):
        grammar.result()


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


def request(prompt: int = 4, fixed: Any = None, **changes: Any) -> Any:
    fixed = [5, 6] if fixed is None else fixed
    values = {"max_tokens": max(len(fixed), 1), "ignore_eos": True} | changes
    params = SamplingParams(extra_args={FIXED_RESPONSE: fixed}, **values)
    return SimpleNamespace(prompt_token_ids=[1] * prompt, sampling_params=params)


def test_a_fitting_request_passes() -> None:
    refuse_unfit(request(prompt=8), True, 10, 10)
    free = SimpleNamespace(sampling_params=SamplingParams(max_tokens=3))
    refuse_unfit(free, False, 10, 10)
    assert fixed_response(free.sampling_params) is None
    assert fixed_response(request().sampling_params) == [5, 6]


@pytest.mark.parametrize(
    ("unfit", "allowed", "complaint"),
    [
        (request(), False, "takes no fixed responses"),
        (request(fixed=[]), True, "one token or more"),
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
def test_what_cannot_be_exact_is_refused(unfit: Any, allowed: bool, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        refuse_unfit(unfit, allowed, 10, 10)
