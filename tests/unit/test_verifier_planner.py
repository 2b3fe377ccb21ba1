"""The planner picks what its cost model says is best, does not flap, and always may stop drafting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.verifier.costs import Acceptance, Costs, Curve
from backend.verifier.planner import DWELL_STEPS, GAIN, OFF, PROBE_STEPS, AutoPlanner, FixedPlanner, Plan, make_planner


def costs(
    step_ms: float = 5.0, token_ms: float = 0.01, draft_ms: float = 0.3, row_ms: float = 0.05, accept: float = 0.7
) -> Costs:
    """A machine whose steps cost `step_ms + token_ms * tokens` and whose drafts cost `k * (draft_ms + row_ms * requests)`."""
    model = Costs()
    for tokens in (1, 5, 20, 80, 160):
        model.verify.observe(tokens, (step_ms + token_ms * tokens) / 1000)
    for rows in (1, 4, 16):
        model.draft_per_token.observe(rows, (draft_ms + row_ms * rows) / 1000)
    model.acceptance.drafted = [1000.0] * 8
    model.acceptance.accepted = [1000.0 * accept] * 8
    return model


def settled(model: Costs, requests: int, k: int = 4) -> Plan:
    planner = AutoPlanner(model, k, 8)
    for _ in range(3 * DWELL_STEPS):
        plan = planner.plan(requests)
    return plan


def test_cheap_drafts_and_good_acceptance_draft_as_much_as_allowed() -> None:
    assert settled(costs(accept=0.95), 1).k == 4


def test_bad_acceptance_stops_drafting() -> None:
    assert settled(costs(accept=0.02), 4) == OFF


def test_a_verifier_whose_cost_is_all_in_tokens_stops_drafting() -> None:
    assert settled(costs(step_ms=0.1, token_ms=1.0), 16) == OFF


def test_slow_drafts_beside_steps_that_cost_by_the_token_are_pipelined() -> None:
    model = costs(step_ms=1.0, token_ms=0.05, draft_ms=0.2, row_ms=0.05, accept=0.9)
    model.ahead_hit_rate = 0.0
    assert settled(model, 16).groups == 2


def test_hits_make_drafting_ahead_the_best_plan_for_one_request() -> None:
    model = costs(draft_ms=1.0)
    model.ahead_hit_rate = 0.9
    assert settled(model, 1).outcomes == 8


@given(
    step_ms=st.floats(0.1, 50),
    token_ms=st.floats(0.001, 2),
    draft_ms=st.floats(0.05, 10),
    accept=st.floats(0, 1),
    requests=st.integers(1, 64),
)
def test_the_plan_is_never_predicted_much_worse_than_any_other(
    step_ms: float, token_ms: float, draft_ms: float, accept: float, requests: int
) -> None:
    model = costs(step_ms, token_ms, draft_ms, accept=accept)
    planner = AutoPlanner(model, 4, 8)
    for _ in range(2 * DWELL_STEPS):
        plan = planner.plan(requests)
    chosen = planner.tokens_per_s(plan, requests)
    others = [OFF, *(Plan(k, groups) for k in range(1, 5) for groups in (1, 2) if groups == 1 or requests >= 4)]
    assert all(planner.tokens_per_s(other, requests) <= GAIN * chosen * 1.001 for other in others)


def test_it_does_not_flap_and_records_why_it_changed() -> None:
    planner = AutoPlanner(costs(accept=0.02), 4, 8)
    plans = [planner.plan(4) for _ in range(200)]
    assert planner.changes == 1
    assert plans[0].k == 4
    assert planner.decision is not None
    assert planner.decision.plan == OFF
    assert planner.decision.requests == 4
    assert planner.decision.verify_s > 0


def test_drafting_is_tried_again_now_and_then() -> None:
    planner = AutoPlanner(costs(accept=0.02), 4, 8)
    plans = [planner.plan(4) for _ in range(3 * PROBE_STEPS)]
    drafted = [plan for plan in plans[2 * DWELL_STEPS :] if plan.k]
    assert 1 <= len(drafted) <= 3


def test_fixed_modes_have_fixed_plans() -> None:
    assert make_planner("sync", Costs(), 4, 8).plan(9) == Plan(4)
    assert make_planner("pipelined", Costs(), 4, 8).plan(9) == Plan(4, groups=2)
    assert make_planner("ahead", Costs(), 4, 8).plan(9) == Plan(4, outcomes=8)
    assert isinstance(make_planner("sync", Costs(), 4, 8), FixedPlanner)


def test_a_curve_is_learned_and_never_falls() -> None:
    curve = Curve()
    assert curve.at(3) is None
    for x in (1, 4, 16, 64):
        curve.observe(x, 2 + 0.5 * x)
    assert curve.at(10) == pytest.approx(7)
    assert curve.at(100) == pytest.approx(52)
    falling = Curve()
    for x in (1, 2, 3):
        falling.observe(x, 10 - x)
    assert falling.at(100) >= falling.at(3) > 0  # type: ignore[operator]


def test_small_batches_are_remembered_through_a_time_of_large_ones() -> None:
    curve = Curve()
    curve.observe(1, 5.0)
    for _ in range(5000):
        curve.observe(80, 50.0)
    assert curve.at(1) == pytest.approx(5.0)


def test_drafts_that_lay_unread_do_not_look_slow() -> None:
    model = Costs()
    for _ in range(50):
        model.note_drafts(1, 4, drafter_s=0.002, waited_s=0.003)
    before = model.draft_s(1, 4)
    for _ in range(50):
        model.note_drafts(1, 4, drafter_s=0.002, waited_s=None)
    assert model.draft_s(1, 4) == pytest.approx(before, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=40), st.integers(0, 8))
def test_expected_length_lies_between_one_and_k_plus_one(seen: list[tuple[int, int]], k: int) -> None:
    acceptance = Acceptance()
    for drafted, accepted in seen:
        acceptance.observe(drafted, min(drafted, accepted))
    assert 1 <= acceptance.length(k) <= k + 1 + 1e-9


def test_acceptance_is_counted_only_where_it_was_decided() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(3, 1)
    assert acceptance.length(1) == pytest.approx(2, abs=0.1)
    assert acceptance.length(3) == pytest.approx(2, abs=0.1)


def test_a_bad_start_does_not_end_drafting_at_once() -> None:
    acceptance = Acceptance()
    for _ in range(3):
        acceptance.observe(4, 0)
    assert acceptance.length(4) > 1.5
    for _ in range(100):
        acceptance.observe(4, 0)
    assert acceptance.length(4) < 1.1
