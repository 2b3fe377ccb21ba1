"""What plans cost and bring: acceptance, curves and measured cycles, and what is estimated from them."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.verifier.costs import Acceptance, Costs, Curve
from backend.verifier.cycles import OFF, Cycles, Plan
from tests.support.simulated_steps import Machine, profiled


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


def test_beyond_what_was_measured_a_curve_grows_in_proportion_at_most() -> None:
    curve = Curve()
    curve.observe(16, 10.0)
    curve.observe(20, 16.0)
    assert curve.at(18) == pytest.approx(13.0)
    assert curve.at(40) == pytest.approx(32.0)


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


def test_verifications_that_went_without_a_draft_count() -> None:
    model, plan = Costs(), Plan(4, groups=2)
    for _ in range(500):
        model.note_verification(Plan(4), 16, True, "features", 4, 4)
    assert model.length(plan, 16) > 4.5
    for number in range(500):
        own_or_none = 4 if number % 4 == 0 else 0
        model.note_verification(plan, 16, True, "own", own_or_none, own_or_none)
    assert model.length(plan, 16) == pytest.approx(1 + 4 / 4, abs=0.2)
    assert model.length(plan, 4) > 4.5, "another load"
    assert model.length(Plan(4), 16) > 4.5, "another structure"


def test_a_plan_never_tried_is_estimated_from_the_nearest_that_was() -> None:
    model = Costs()
    for tokens in (1, 5, 20):
        model.verify.observe(tokens, 0.005)
    model.draft.observe(1, 0.001)
    plain = model.per_verification_s(Plan(4), 1)
    for clock in range(20):
        model.cycles.observe(Plan(3), 1, 0.010, 0.008, clock)
    assert model.per_verification_s(Plan(3), 1) == pytest.approx(0.018)
    assert model.per_verification_s(Plan(4), 1) == pytest.approx(plain * 0.018 / (0.005 + 0.004), rel=0.01)


def test_one_hiccup_does_not_condemn_a_plan() -> None:
    model = Costs()
    for clock in range(20):
        model.cycles.observe(Plan(3), 1, 0.009, 0.001, clock)
    model.cycles.observe(Plan(3), 1, 5.0, 5.0, 20)
    assert model.per_verification_s(Plan(3), 1) < 0.012


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
    for _ in range(200):
        acceptance.observe(4, 0)
    assert acceptance.length(4) < 1.1


def test_greedy_requests_are_drafted_for_though_sampled_ones_were_not_worth_it() -> None:
    model = Costs()
    plan = Plan(4)
    for _ in range(400):
        model.note_verification(plan, 1, True, "features", 4, 4)
        model.note_verification(plan, 1, False, "features", 4, 0)
    model.greedy_share = 1.0
    assert model.length(plan, 1) > 4.5
    model.greedy_share = 0.0
    assert model.length(plan, 1) < 1.2
    model.greedy_share = 0.5
    assert 2.5 < model.length(plan, 1) < 3.5


def test_what_drafting_ahead_shows_of_the_drafter_counts_for_every_plan() -> None:
    model = Costs()
    for _ in range(400):
        model.note_verification(Plan(4, outcomes=8), 1, True, "ahead", 4, 4)
    assert model.length(Plan(4), 1) > 4.5
    for _ in range(2_000):
        model.note_verification(Plan(4, outcomes=8), 1, True, "own", 4, 0)
    assert model.length(Plan(4), 1) > 4.5, "the request's own text is no drafter's"
    assert model.length(Plan(4, outcomes=8), 1) < 1.5


def test_what_lookups_bring_at_a_load_is_measured_there() -> None:
    costs, plan = Costs(lookups=(0.9, 4.0)), Plan(4, lookup=True)
    for tokens in (4, 16):
        costs.verify.observe(tokens, 0.01)
    assert costs.length(plan, 4) == pytest.approx(4.0)
    for _ in range(400):
        costs.note_verification(plan, 4, True, "own", 4, 1)
    assert costs.length(plan, 4) == pytest.approx(2.0, abs=0.15)
    assert costs.length(plan, 1) == pytest.approx(4.0), "another load"
    costs.greedy_share = 0.0
    assert costs.length(plan, 4) == pytest.approx(4.0), "other requests"


def test_a_hiccup_among_the_first_measurements_condemns_no_plan() -> None:
    cycles = Cycles()
    for clock, seconds in enumerate((0.002, 0.030, 0.002, 0.002)):
        cycles.observe(Plan(4), 1, seconds / 2, seconds / 2, clock)
    assert cycles.at(Plan(4), 1) == 0.002


def test_what_was_measured_long_ago_gives_way() -> None:
    cycles = Cycles()
    for clock in range(50):
        cycles.observe(Plan(4), 1, 0.010, 0.0, clock)
    for number, limit in enumerate((0.006, 0.004, 0.003)):
        for clock in range(5_000 + 200 * number, 5_005 + 200 * number):
            cycles.observe(Plan(4), 1, 0.002, 0.0, clock)
        assert 0.002 <= (cycles.at(Plan(4), 1) or 0.0) < limit


def test_drafted_steps_say_nothing_of_plain_ones_and_more_tokens_cost_at_most_in_proportion() -> None:
    costs = profiled(Machine())
    plain = costs.per_verification_s(OFF, 16)
    for clock in range(20):
        costs.cycles.observe(Plan(2, outcomes=8), 16, 1.0, 0.0, clock)
    assert costs.per_verification_s(OFF, 16) == plain
    costs.verify.observe(80, 30.0)
    costs.cycles.observe(Plan(3), 16, 0.004, 0.0, 0)
    for clock in range(4):
        costs.cycles.observe(Plan(3), 16, 0.004, 0.0, clock)
    assert costs.per_verification_s(Plan(4), 16) == pytest.approx(0.005)
    assert 0.003 <= costs.per_verification_s(Plan(2), 16) <= 0.004


def test_sampled_steps_are_timed_apart_from_greedy_ones_and_stand_in_for_them() -> None:
    costs = Costs(greedy_share=0.0)
    for clock in range(8):
        costs.cycles.observe(Plan(4), 4, 0.006, 0.0, clock)
    costs.greedy_share = 1.0
    assert costs.per_verification_s(Plan(4), 4) == 0.006
    for clock in range(8):
        costs.cycles.observe(Plan(4), 4, 0.004, 0.0, clock)
    assert costs.per_verification_s(Plan(4), 4) == 0.004
    costs.greedy_share = 0.4
    assert costs.per_verification_s(Plan(4), 4) == 0.006


def test_requests_of_the_other_kind_stand_in_at_the_rate_of_what_was_measured_of_both() -> None:
    costs = Costs(greedy_share=1.0)
    for clock in range(8):
        costs.cycles.observe(Plan(4), 4, 0.004, 0.0, clock)
        costs.cycles.observe(OFF, 4, 0.002, 0.0, clock)
    costs.greedy_share = 0.0
    for clock in range(8):
        costs.cycles.observe(OFF, 4, 0.003, 0.0, clock)
    assert costs.per_verification_s(Plan(4), 4) == pytest.approx(0.006)


def test_a_moment_when_the_machine_was_slow_does_not_condemn_a_plan_measured_before_nor_for_good() -> None:
    cycles = Cycles()
    for clock in range(5):
        cycles.observe(OFF, 4, 0.002, 0.0, clock)
    for clock in range(500, 505):
        cycles.observe(OFF, 4, 0.004, 0.0, clock)
    assert cycles.at(OFF, 4) < 0.0031, "half of what is new, at most"
    for clock in range(505, 900):
        cycles.observe(OFF, 4, 0.004, 0.0, clock)
    assert cycles.at(OFF, 4) == pytest.approx(0.004, rel=0.05)
    for began in (2000, 3000, 4000):
        for clock in range(began, began + 5):
            cycles.observe(OFF, 4, 0.002, 0.0, clock)
    assert cycles.at(OFF, 4) == pytest.approx(0.002, rel=0.15)


def test_a_trial_is_not_judged_by_its_quick_steps() -> None:
    dice, cycles, found = random.Random(0), Cycles(), []
    for trial in range(400):
        for step in range(5):
            cycles.observe(OFF, 4, 0.002 * dice.lognormvariate(0, 0.15), 0.0, 1000 * trial + step)
        found.append(cycles.at(OFF, 4) or 0.0)
    assert statistics.mean(found) == pytest.approx(0.002, rel=0.015)


def test_a_plan_in_force_measures_the_machine_and_a_plan_on_trial_is_measured_by_it() -> None:
    cycles = Cycles()
    for clock in range(20):
        cycles.observe(OFF, 4, 0.002, 0.0, clock)
    for clock in range(20, 60):
        cycles.observe(OFF, 4, 0.003, 0.0, clock, in_force=True)
    assert cycles.at(OFF, 4) == pytest.approx(0.003, rel=0.01)
    for clock in range(60, 65):
        cycles.observe(Plan(2), 4, 0.006, 0.0, clock)
    assert cycles.at(Plan(2), 4) == pytest.approx(0.006, rel=0.01)
    for clock in range(65, 105):
        cycles.observe(OFF, 4, 0.002, 0.0, clock, in_force=True)
    assert cycles.at(Plan(2), 4) == pytest.approx(0.004, rel=0.02)


def test_what_the_machine_does_for_long_is_its_usual_speed() -> None:
    cycles = Cycles()
    for clock in range(20):
        cycles.observe(OFF, 4, 0.002, 0.0, clock)
        cycles.observe(Plan(2), 4, 0.004, 0.0, clock)
    for clock in range(20, 100):
        cycles.observe(OFF, 4, 0.006, 0.0, clock, in_force=True)
    assert 0.5 < cycles.slowness < 2
    assert cycles.at(OFF, 4) == pytest.approx(0.006, rel=0.01)
    assert cycles.at(Plan(2), 4) == pytest.approx(0.012, rel=0.01)


def test_waits_count_with_their_mean_and_slow_steps_with_less() -> None:
    cycles = Cycles()
    for clock in range(400):
        cycles.observe(Plan(2), 1, 0.010 if clock % 4 else 0.014, 0.004 * (clock % 2), clock)
    measured = cycles.measured[Plan(2), 0]
    assert measured.rest_s == pytest.approx(0.002, rel=0.2)
    assert 0.010 <= measured.step_s < 0.011


def test_steps_of_lookups_count_with_their_mean_from_the_first_on() -> None:
    cycles = Cycles()
    for clock in range(8):
        cycles.observe(Plan(4, lookup=True), 4, 0.003 if clock % 4 == 0 else 0.002, 0.0, clock)
    assert cycles.at(Plan(4, lookup=True), 4) == pytest.approx(0.00225, rel=0.01)
    for clock in range(8, 400):
        cycles.observe(Plan(4, lookup=True), 4, 0.004 if clock % 2 else 0.002, 0.0001, clock)
    assert cycles.at(Plan(4, lookup=True), 4) == pytest.approx(0.0031, rel=0.05)
