"""The scenarios: what they ask; the objectives."""

import json
import random
from argparse import Namespace

import pytest

from loadtest import slo
from loadtest.scenarios import SCENARIOS, LoadRequest, log_uniform

OPTIONS = Namespace(model="m", prompt_tokens=128, max_tokens=64, temperature=0.0, seed=0)


def first_requests(name: str, count: int, seed: str = "s", share: float = 0.0) -> list[LoadRequest]:
    """The first questions of one user."""
    workload = SCENARIOS[name](OPTIONS, random.Random(seed), lambda: share)
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


def test_the_domain_shifts_at_half_time_and_lengths_are_spread_evenly_over_their_logarithm() -> None:
    for share, domain in ((0.49, "code"), (0.51, "prose")):
        assert {ask.label for ask in first_requests("domain-shift", 5, share=share)} == {domain}
    chance = random.Random(0)
    drawn = [log_uniform(8, 512, chance) for _ in range(2000)]
    assert 8 <= min(drawn) < max(drawn) <= 512
    assert sum(each <= 64 for each in drawn) == pytest.approx(1000, abs=120)


def test_objectives_are_read_and_checked() -> None:
    assert slo.limits("ttft_p95_ms=2000, failures=0,tgs_p50=20") == {"ttft_p95_ms": 2000, "failures": 0, "tgs_p50": 20}
    for wrong in ("failures", "failures=x"):
        with pytest.raises(ValueError, match="could not convert"):
            slo.limits(wrong)
    assert set(slo.DEFAULT) <= {*slo.CEILINGS, *slo.FLOORS}
    # A limit is kept at its very value, and missed without one.
    limits = {"ttft_p95_ms": 100.0, "tgs_p50": 20.0, "failures": 0.0, "acceptance_length": 2.0}
    assert slo.misses(limits, limits) == []
    above, below, missing = slo.misses(limits, {"ttft_p95_ms": 101.0, "tgs_p50": 19.0, "failures": 0.0})
    assert (above, below) == ("ttft_p95_ms: 101 is above the limit of 100", "tgs_p50: 19 is below the limit of 20")
    assert missing == "acceptance_length: nothing was measured (limit 2)"
