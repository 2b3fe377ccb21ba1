"""Taking in requests that another verifier has begun: the parts that need no engine."""

import copy
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from backend.engine.resume import _advanced, _complete, continued_seed, rule_of
from backend.speculation.chances import Rule
from backend.wire.engine import RequestOptions


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
        assert rule_of(own) == rule


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
