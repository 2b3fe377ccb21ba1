"""What the coordinator makes of cumulative counters."""

import pytest

from backend.coordinator.assignment import VerifierLoad
from backend.fleet import DraftCounters, VerifierStats


def stats(running: int = 4, tokens: int = 0, started_at: float = 0.0, **fields: object) -> VerifierStats:
    return VerifierStats("v0", started_at, "auto", 4, running=running, tokens=tokens, **fields)  # type: ignore[arg-type]


def test_an_average_forgets_with_time() -> None:
    load = VerifierLoad()
    load.observe(stats(10, plain_step_s=0.02), 0.0)
    assert (load.requests, load.plain_s) == (10.0, 0.02)
    for i in range(1, 9):
        load.observe(stats(0), 0.25 * i)
    assert load.requests == pytest.approx(10 * 2.718281828**-1, rel=1e-6)
    assert load.plain_s == 0.02, "an idle verifier has no steps"
    for i in range(9, 17):
        load.observe(stats(10, plain_step_s=0.12), 0.25 * i)
    assert load.plain_s == pytest.approx(0.12 - 0.1 * 2.718281828**-1, rel=1e-6)


def test_a_verifiers_load_speed_and_acceptance() -> None:
    load = VerifierLoad()
    for i in range(40):
        counters = {"d0": DraftCounters(10 * i, accepted_tokens=20 * i), "d1": DraftCounters(10 * i, accepted_tokens=10 * i)}
        counters["lookup"] = DraftCounters(50 * i, accepted_tokens=200 * i)
        report = stats(
            4, 25 * i, plain_step_s=0.03, drafted_step_s=0.04, drafters=counters, drafters_down=["d1"] if i > 5 else []
        )
        load.observe(report, 0.25 * i)
    assert load.requests == 4
    assert load.plain_s == pytest.approx(0.03)
    assert load.drafted_s == pytest.approx(0.04)
    assert load.length == pytest.approx(2.5)
    assert load.may_skip
    assert load.down == {"d1"}
    load.observe(stats(4, 1000, drafters_down=[]), 10.0)
    assert load.down == frozenset()


def test_what_a_verifier_makes_without_drafters() -> None:
    load = VerifierLoad()
    load.observe(stats(plain_step_s=0.03), 0.0)
    assert load.bare_s == 0
    load.observe(stats(plain_step_s=0.03, lookup_step_s=0.05, lookup_length=4.0), 0.25)
    assert load.bare_s == pytest.approx(0.0125)
    for i in range(100):
        load.observe(stats(plain_step_s=0.03, lookup_step_s=0.05, lookup_length=1.2), 0.5 + 0.25 * i)
    assert load.bare_s == pytest.approx(0.03, rel=1e-3), "look-ups that do not pay are not made"
    fixed = VerifierLoad()
    fixed.observe(VerifierStats("v0", 0.0, "sync", 4, running=4, plain_step_s=0.03, lookup_step_s=0.05, lookup_length=4.0), 0.0)
    assert fixed.bare_s == 0, "whoever asks for drafters gets them"


def test_what_the_plan_hides_behind_verification() -> None:
    load = VerifierLoad()
    load.observe(stats(plan_k=4), 0.0)
    assert load.overlap == 0
    ahead = {"d0": DraftCounters(ahead_hits=30, ahead_misses=10)}
    load.observe(stats(plan_outcomes=8, drafters=ahead), 0.5)
    assert load.overlap == 0.75
