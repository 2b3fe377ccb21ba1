"""The planner finds what is best, does not flap, and always may stop drafting."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.verifier.costs import Costs
from backend.verifier.cycles import OFF, Plan
from backend.verifier.planner import CALL_STEPS, REVISIT_STEPS, AutoPlanner, FixedPlanner, make_planner
from backend.verifier.trials import AT_START, SHARE, TrialBudget
from tests.support.simulated_steps import Machine, all_plans, profiled, run

GPU_LIKE = Machine()
MACHINES = {
    "gpu-like": GPU_LIKE,
    "half accepted": Machine(accept=0.5),
    "hardly accepted": Machine(accept=0.3, hits=0.3),
    "tokens cost": Machine(token=1.5),
    "slow drafts": Machine(step=2.0, draft=2.0, pass_=0.8),
    "small target": Machine(step=1.0, token=0.05, draft=0.2, pass_=0.5, accept=0.9),
    "few hits": Machine(hits=0.3),
    "never accepted": Machine(accept=0.02),
    "large target": Machine(step=30.0, token=2.0),
}


def settled(machine: Machine, requests: int, steps: int = 1500) -> Plan:
    """The plan most in force after a while."""
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8)
    dice = random.Random(1)
    plans: list[Plan] = []
    run(machine, planner, costs, requests, steps, dice, plans)
    return statistics.mode(plans[-400:])


@pytest.mark.parametrize("name", MACHINES)
def test_goodput_is_within_five_percent_of_the_best_fixed_plan_while_the_load_changes(name: str) -> None:
    machine = MACHINES[name]
    got = best = 0.0
    for seed in range(3):
        costs = profiled(machine)
        planner = AutoPlanner(costs, 4, 8)
        dice = random.Random(seed)
        for place, requests in enumerate((1, 4, 16, 1, 16, 4, 1)):
            goodput = run(machine, planner, costs, requests, 800, dice)
            if place > 2:
                got, best = got + goodput, best + machine.best(all_plans(requests), requests)
    assert got > 0.95 * best


def test_cheap_drafts_and_good_acceptance_draft_as_much_as_allowed() -> None:
    assert settled(Machine(accept=0.97, token=0.02), 1).k == 4


def test_bad_acceptance_stops_drafting() -> None:
    assert settled(Machine(accept=0.02), 4) == OFF


def test_a_verifier_whose_cost_is_all_in_tokens_stops_drafting() -> None:
    assert settled(Machine(step=0.1, token=1.0, accept=0.6), 16) == OFF


def test_slow_drafts_beside_steps_that_cost_by_the_token_are_pipelined() -> None:
    machine = Machine(step=4.0, token=0.05, draft=4.0, accept=0.9, hits=0.05, ahead_loss=0.3, enumeration=6.0)
    others = [plan for plan in all_plans(16) if plan.groups == 1]
    assert machine.best(all_plans(16), 16) > 1.1 * machine.best(others, 16)
    assert settled(machine, 16).groups == 2


def test_hits_make_drafting_ahead_the_best_plan_for_one_request() -> None:
    assert settled(Machine(draft=3.0, hits=0.95, ahead_loss=0.01), 1).outcomes == 8


@settings(max_examples=10, deadline=None)
@given(
    step=st.floats(2, 50),
    token=st.floats(0.001, 2),
    draft=st.floats(0.05, 10),
    accept=st.floats(0, 0.95),
    requests=st.sampled_from([1, 3, 8, 16]),
    seed=st.integers(0, 1000),
)
def test_no_machine_makes_it_much_worse_than_the_best_plan(
    step: float, token: float, draft: float, accept: float, requests: int, seed: int
) -> None:
    machine = Machine(step, token, draft, accept=accept)
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8)
    dice = random.Random(seed)
    run(machine, planner, costs, requests, 600, dice)
    goodput = run(machine, planner, costs, requests, 600, dice)
    assert goodput > 0.8 * machine.best(all_plans(requests), requests)


def test_it_does_not_flap_and_records_why_it_changed() -> None:
    machine = Machine(accept=0.02)
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8)
    run(machine, planner, costs, 4, 2000, random.Random(3))
    assert 1 <= planner.changes <= 8
    decision = planner.decision
    assert decision is not None
    assert decision.plan == OFF
    assert decision.requests == 4
    assert decision.predicted_tokens_per_s > decision.present_tokens_per_s
    assert decision.verify_s > 0


def test_drafting_is_tried_again_now_and_then() -> None:
    machine = Machine(accept=0.02)
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8)
    dice = random.Random(3)
    run(machine, planner, costs, 4, 1000, dice)
    plans: list[Plan] = []
    run(machine, planner, costs, 4, 4 * REVISIT_STEPS, dice, plans)
    assert 7 <= sum(plan.k > 0 for plan in plans) <= 4 * REVISIT_STEPS / 10


def test_drafters_take_in_what_was_said_before_they_are_asked_again() -> None:
    machine = Machine(accept=0.02)
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8)
    dice = random.Random(3)
    run(machine, planner, costs, 4, 1000, dice)
    while planner.plan(4).remote_k:
        planner.stepped(4, 4, 0.006, 0.006)
    called, plan = 0, OFF
    while not plan.remote_k:
        plan = planner.plan(4)
        called += planner.calls_drafters
        planner.stepped(4, 4, 0.006, 0.006)
    assert called == CALL_STEPS
    assert not planner.calls_drafters


def test_drafting_begins_again_when_it_begins_to_pay() -> None:
    bad, good = Machine(accept=0.02), Machine(accept=0.95)
    costs = profiled(bad)
    planner = AutoPlanner(costs, 4, 8)
    dice = random.Random(5)
    run(bad, planner, costs, 1, 1000, dice)
    run(good, planner, costs, 1, 1500, dice)
    assert run(good, planner, costs, 1, 500, dice) > 0.8 * good.best(all_plans(1), 1)


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_a_drafter_that_becomes_slow_is_not_taken_for_a_machine_that_did(requests: int) -> None:
    quick, slow = Machine(accept=0.95), Machine(accept=0.95, draft=60.0, hits=0.0)
    costs = profiled(quick)
    planner = AutoPlanner(costs, 4, 8)
    dice = random.Random(6)
    run(quick, planner, costs, requests, 1000, dice)
    run(slow, planner, costs, requests, 1000, dice)
    assert run(slow, planner, costs, requests, 500, dice) > 0.9 * slow.best(all_plans(requests), requests)


@pytest.mark.parametrize(("found", "accept"), [(0.9, 0.3), (0.7, 0.5), (0.5, 0.1), (0.0, 0.1)])
def test_text_that_repeats_itself_is_drafted_from_itself_where_that_brings_most(found: float, accept: float) -> None:
    machine = Machine(token=0.3, accept=accept, hits=accept, found=found, found_accept=0.95)
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8, lookup=True)
    dice = random.Random(4)
    got = best = 0.0
    plans: list[Plan] = []
    for place, requests in enumerate((1, 4, 16, 1, 16, 4, 1)):
        goodput = run(machine, planner, costs, requests, 800, dice, plans)
        if place > 2:
            got, best = got + goodput, best + machine.best(all_plans(requests, lookup=True), requests)
    assert got > 0.95 * best
    # Where nothing is found, lookups cost what plain steps cost, and may stand in for them.
    assert not found or sum(plan.lookup for plan in plans) / len(plans) > 0.7


def test_lookups_are_tried_again_when_nothing_else_pays_and_chosen_when_text_begins_to_repeat_itself() -> None:
    fresh, repeating = Machine(accept=0.02), Machine(accept=0.02, found=0.9)
    costs = profiled(fresh)
    planner = AutoPlanner(costs, 4, 8, lookup=True)
    dice = random.Random(5)
    run(fresh, planner, costs, 4, 2000, dice)
    plans: list[Plan] = []
    run(repeating, planner, costs, 4, 2000, dice, plans)
    assert sum(plan.lookup for plan in plans[-400:]) > 300


def test_without_lookups_they_are_no_plan() -> None:
    machine = Machine(accept=0.1, found=0.9)
    planner = AutoPlanner(profiled(machine), 4, 8)
    plans: list[Plan] = []
    run(machine, planner, profiled(machine), 4, 1000, random.Random(1), plans)
    assert not any(plan.lookup for plan in plans)


def test_fixed_modes_have_fixed_plans() -> None:
    assert make_planner("sync", Costs(), 4, 8).plan(9) == Plan(4)
    assert make_planner("pipelined", Costs(), 4, 8).plan(9) == Plan(4, groups=2)
    assert make_planner("ahead", Costs(), 4, 8).plan(9) == Plan(4, outcomes=8)
    assert isinstance(make_planner("sync", Costs(), 4, 8), FixedPlanner)


def test_a_plan_is_not_chosen_before_it_was_measured_where_the_present_one_was() -> None:
    machine = Machine(accept=0.9)
    costs = profiled(machine)
    planner = AutoPlanner(costs, 4, 8)
    plans: list[Plan] = []
    run(machine, planner, costs, 4, 600, random.Random(2), plans)
    measured_at = {plan: costs.cycles.measured.get((plan, 4)) for plan in set(plans)}
    assert all(found is not None for found in measured_at.values())
    assert planner.decision is None or costs.cycles.at(planner.decision.plan, 4) is not None


def test_slow_moments_of_the_machine_do_not_make_it_draft_where_that_does_not_pay() -> None:
    machine = Machine(step=7.0, token=0.6, accept=0.45, hits=0.45, slow_moments=0.01)
    drafted: list[float] = []
    for seed in range(8):
        costs = profiled(machine)
        planner = AutoPlanner(costs, 4, 8)
        dice = random.Random(seed)
        run(machine, planner, costs, 16, 600, dice)
        plans: list[Plan] = []
        run(machine, planner, costs, 16, 1200, dice, plans)
        drafted.append(sum(plan.k > 0 for plan in plans) / len(plans))
    assert statistics.mean(drafted) < 0.1


def test_a_machine_whose_speed_wanders_does_not_make_it_change_to_and_fro() -> None:
    machine = Machine(step=5.5, token=1.2, draft=1.5, pass_=0.5, accept=0.5, hits=0.5, noise=0.08, drift=0.12)
    changes = 0
    for seed in range(12):
        costs = profiled(machine)
        planner = AutoPlanner(costs, 4, 8)
        dice = random.Random(seed)
        run(machine, planner, costs, 4, 600, dice)
        before = planner.changes
        run(machine, planner, costs, 4, 1200, dice)
        changes += planner.changes - before
    assert changes / 12 < 2


def test_trials_lose_a_small_share_of_the_steps_however_bad_they_are() -> None:
    budget = TrialBudget()
    lost = 0.0
    for _ in range(20_000):
        budget.stepped()
        if budget.affords(3.0):
            budget.spend(6.0)
            lost += 6.0
    assert lost <= AT_START + 6.0 + SHARE * 20_000
    assert lost > SHARE * 20_000 / 2
