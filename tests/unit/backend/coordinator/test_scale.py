"""The policy over many members: what is lost is made up for, changing loads move little, and a decision takes milliseconds."""

from __future__ import annotations

import statistics
import time

import pytest

from backend.coordinator.assignment import Pair
from backend.coordinator.messages import Report
from backend.coordinator.policy import DECIDE_EVERY_S, Coordinator
from backend.fleet import Member, MemberKind, VerifierStats
from tests.unit.backend.coordinator.test_assignment import Fleet

MANY = 12


def register(policy: Coordinator, name: str, now: float) -> None:
    kind: MemberKind = "verifier" if name.startswith("v") else "drafter"
    policy.register(Member(name, kind, "i", "ipc:///x", "", "n", 1, "demo", "ready"), now)


def bound(fleet: Fleet) -> set[Pair]:
    return {(each.verifier_id, each.drafter_id) for each in fleet.policy.snapshot(fleet.now).assignments}


@pytest.fixture
def fleet() -> Fleet:
    """As many drafters as verifiers and a few more, in a steady state."""
    made = Fleet([2] * MANY, MANY + 4, 1)
    made.run(10, 0.05)
    return made


def test_a_load_that_goes_to_and_fro_takes_no_drafter_along(fleet: Fleet) -> None:
    """Every second the other half of the verifiers is busy: averages and dwell keep drafters where they are."""
    before, since = fleet.policy.snapshot(fleet.now), dict(fleet.policy.situation(fleet.now).bindings)
    for second in range(40):
        fleet.loads = [3 if (i + second) % 2 else 1 for i in range(MANY)]
        fleet.run(1, 0.05)
        now_bound = dict(fleet.policy.situation(fleet.now).bindings)
        stayed_s = [fleet.now - since[pair] for pair in since.keys() - now_bound.keys()]
        assert all(each >= 5.0 for each in stayed_s)
        since = now_bound
    moved = fleet.policy.snapshot(fleet.now).counters["reassignments"] - before.counters["reassignments"]
    assert moved <= MANY, f"{moved} moves in 40 changes of load"


def test_many_verifiers_are_assigned_and_a_loss_is_answered_at_once() -> None:
    assigned_to(200)


@pytest.mark.campaign
def test_deciding_for_a_thousand_verifiers_takes_milliseconds() -> None:
    spent = assigned_to(1000)
    assert statistics.median(spent) < 0.1
    assert max(spent) < 3.0


def assigned_to(verifiers: int) -> list[float]:
    """Seconds of each decision, with four drafters for each verifier."""
    policy, names = Coordinator(2.0), [*(f"v{i}" for i in range(verifiers)), *(f"d{i}" for i in range(4 * verifiers))]
    for name in names:
        register(policy, name, 0.0)
    spent = []
    for turn in range(1, 13):
        now = turn * DECIDE_EVERY_S
        began = time.process_time()
        policy.tick(now)
        spent.append(time.process_time() - began)
        for name in names[1:]:
            stats = VerifierStats(name, 0.0, "auto", 4, running=int(name[1:]) % 16) if name.startswith("v") else None
            policy.report(Report(name, "i", "ready", stats), now)
    found = {(each.verifier_id, each.drafter_id) for each in policy.snapshot(now).assignments}
    assert {drafter for _, drafter in found} == {name for name in names if name.startswith("d")}
    assert {verifier for verifier, _ in found} == {f"v{i}" for i in range(1, verifiers)}, "v0 never reported"
    assert policy.counters.leases_expired == 1
    return spent
