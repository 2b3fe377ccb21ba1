"""The scenarios: what they ask, and when; the objectives."""

import json
import random
from argparse import ArgumentTypeError, Namespace

import pytest

from loadtest import slo
from loadtest.scenarios import SCENARIOS, LoadRequest, log_uniform

OPTIONS = Namespace(model="m", prompt_tokens=128, max_tokens=64, temperature=0.0, seed=0)


def first_requests(name: str, count: int, seed: str = "s", share: float = 0.0) -> list[LoadRequest]:
    """The first questions of one user."""
    workload = SCENARIOS[name].make(OPTIONS, random.Random(seed), lambda: share)
    return [next(workload), *(workload.send("answer") for _ in range(count - 1))]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_same_seed_asks_the_same_and_streams_want_their_usage(name: str) -> None:
    requests = first_requests(name, 12)
    assert requests == first_requests(name, 12) != first_requests(name, 12, seed="other")
    for ask in requests:
        assert ask.path.startswith("/v1/")
        assert (ask.body["stream"], ask.body["stream_options"]) == (True, {"include_usage": True})
        json.dumps(ask.body)


def test_a_conversation_grows_and_keeps_its_prefix() -> None:
    requests = first_requests("multiturn", 5)
    lengths = [len(ask.body["messages"]) for ask in requests]
    assert lengths == [2, 4, 6, 8, 2]
    assert requests[1].body["messages"][:2] == requests[0].body["messages"]
    assert requests[1].body["messages"][2] == {"role": "assistant", "content": "answer"}
    assert len({ask.body["messages"][0]["content"] for ask in requests + first_requests("multiturn", 1, "other user")}) == 1


def test_the_domain_shifts_at_half_time() -> None:
    assert {ask.label for ask in first_requests("domain-shift", 5, share=0.49)} == {"code"}
    assert {ask.label for ask in first_requests("domain-shift", 5, share=0.51)} == {"prose"}


def test_lengths_are_spread_evenly_over_their_logarithm() -> None:
    chance = random.Random(0)
    drawn = [log_uniform(8, 512, chance) for _ in range(2000)]
    assert min(drawn) >= 8
    assert max(drawn) <= 512
    assert sum(each <= 64 for each in drawn) == pytest.approx(1000, abs=120)


def test_objectives_are_read_and_checked() -> None:
    assert slo.limits("ttft_p95_ms=2000, failures=0,tgs_p50=20") == {"ttft_p95_ms": 2000, "failures": 0, "tgs_p50": 20}
    with pytest.raises(ArgumentTypeError, match="did you mean ttft_p95_ms"):
        slo.limits("ttft_p95=1")
    for wrong in ("failures", "failures=x"):
        with pytest.raises(ValueError, match="could not convert"):
            slo.limits(wrong)
    assert set(slo.DEFAULT) <= {*slo.CEILINGS, *slo.FLOORS}


def test_a_limit_is_kept_at_its_very_value_and_missed_without_one() -> None:
    limits = {"ttft_p95_ms": 100.0, "tgs_p50": 20.0, "failures": 0.0, "acceptance_length": 2.0}
    assert slo.misses(limits, limits) == []
    assert slo.misses(limits, {"ttft_p95_ms": 101.0, "tgs_p50": 19.0, "failures": 1.0}) == [
        "ttft_p95_ms: 101 is above the limit of 100",
        "tgs_p50: 19 is below the limit of 20",
        "failures: 1 is above the limit of 0",
        "acceptance_length: nothing was measured (limit 2)",
    ]
