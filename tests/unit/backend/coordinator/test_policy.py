"""The coordinator's policy: leases, generations, and who drafts for whom."""

import statistics
import time
from collections import Counter
from typing import cast

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.coordinator.administration import Administration
from backend.coordinator.assignment import VerifierLoad
from backend.coordinator.policy import DECIDE_EVERY_S, FORGET_LOST_S, START_LEASE_S, Coordinator
from backend.fleet import (
    DraftCounters,
    DrafterStats,
    Draining,
    Member,
    MemberKind,
    MemberState,
    MemberView,
    Orders,
    VerifierStats,
)
from backend.fleet.speed import Speed
from tests.support.properties import examples

LEASE_S = 2.0


def member(member_id: str, kind: MemberKind, incarnation: str = "i0", state: MemberState = "ready") -> Member:
    return Member(member_id, kind, incarnation, f"ipc:///tmp/{member_id}", "", "node", 1, "demo", state)


def fleet(verifiers: int, drafters: int, now: float = 0.0) -> Coordinator:
    policy = Coordinator(LEASE_S)
    for i in range(verifiers):
        policy.register(member(f"v{i}", "verifier"), now)
    for i in range(drafters):
        policy.register(member(f"d{i}", "drafter"), now)
    return policy


def view(policy: Coordinator, member_id: str, now: float) -> MemberView:
    return next(each for each in policy.snapshot(now).members if each.member.id == member_id)


def pairs(policy: Coordinator, now: float) -> set[tuple[str, str]]:
    return {(a.verifier_id, a.drafter_id) for a in policy.snapshot(now).assignments}


def report(
    policy: Coordinator, member_id: str, now: float, running: int = 0, incarnation: str = "i0", state: MemberState = "ready"
) -> Orders:
    stats = VerifierStats(member_id, 0.0, "sync", 4, running=running) if member_id.startswith("v") else None
    return policy.report(member_id, incarnation, stats, state, now)


def test_a_decision_is_made_at_once_when_somebody_comes_and_else_now_and_then() -> None:
    policy = fleet(2, 2)
    before = policy.snapshot(0.0).counters["decisions"]
    for i in range(100):
        policy.tick(0.001 * i)
    assert policy.snapshot(0.1).counters["decisions"] == before
    policy.register(member("d2", "drafter"), 0.11)
    assert len(report(policy, "v0", 0.12).drafters) == 2
    policy.tick(0.12 + DECIDE_EVERY_S)
    assert policy.snapshot(0.7).counters["decisions"] == before + 2


def test_who_moves_or_restarts_is_bound_anew_and_not_ousted_by_the_process_before_it() -> None:
    policy = fleet(1, 1)
    first = policy.snapshot(0.0).assignments[0].generation
    policy.register(Member("d0", "drafter", "i0", "tcp://127.0.0.1:7", "", "node", 1, "demo", "ready"), 0.2)
    (moved,) = report(policy, "v0", 0.3).drafters
    assert (moved.address, policy.snapshot(0.3).counters["restarts"]) == ("tcp://127.0.0.1:7", 0)
    policy.register(member("d0", "drafter", incarnation="i1"), 0.5)
    assert not report(policy, "d0", 0.6).known
    policy.register(member("d0", "drafter"), 0.6)
    assert report(policy, "d0", 0.7, incarnation="i1").known
    (restarted,) = report(policy, "v0", 0.7).drafters
    assert (restarted.incarnation, policy.snapshot(0.7).counters["restarts"]) == ("i1", 1)
    assert first < moved.generation < restarted.generation


def test_what_a_process_measured_is_forgotten_with_it() -> None:
    policy = fleet(1, 1)
    for now, drafts in ((0.1, 1000), (0.2, 1100)):
        counted = {"d0": DraftCounters(drafts, accepted_tokens=2 * drafts)}
        stats = VerifierStats("v0", 0.0, "auto", 4, running=4, drafters=counted, drafters_down=["d0"])
        policy.report("v0", "i0", stats, "ready", now)
    policy.report("d0", "i0", DrafterStats("d0", 0.0, speed=Speed(0.01, 0.001)), "ready", 0.2)
    before = policy.situation(0.2)
    assert before.verifiers["v0"].length == 3
    assert before.verifiers["v0"].down == {"d0"}
    assert before.drafters["d0"] == Speed(0.01, 0.001)
    for name, kind in (("v0", "verifier"), ("d0", "drafter")):
        policy.register(member(name, cast(MemberKind, kind), "i1"), 0.3)
    policy.report("v0", "i1", VerifierStats("v0", 9.0, "auto", 4, running=4), "ready", 0.4)
    after = policy.situation(0.4)
    assert after.verifiers == {"v0": VerifierLoad(requests=4)}
    assert after.drafters == {"d0": None}


def test_a_drain_outlives_a_member_that_has_left_or_was_lost_long_ago_until_it_is_ended() -> None:
    policy = fleet(2, 1)
    policy.drain("v0", 0.1, migrate_after_s=5.0)
    policy.deregister("v0", "i0", 0.2)
    policy.register(member("v0", "verifier", "i1"), 0.3)
    assert report(policy, "v0", 0.4, incarnation="i1").drain
    assert pairs(policy, 0.4) == {("v1", "d0")}
    late = 2 * FORGET_LOST_S
    assert policy.snapshot(late).members[0].member.id != "v0"
    policy.register(member("v0", "verifier", "i2"), late)
    assert view(policy, "v0", late).drain == Draining(migrate=True, deadline_s=0.0)
    policy.deregister("v0", "i2", late)
    policy.resume("v0", late)
    policy.register(member("v0", "verifier", "i3"), late)
    assert not report(policy, "v0", late, incarnation="i3").drain


def test_a_restarted_coordinator_is_told_the_drains_and_pins_and_no_member_need_have_registered() -> None:
    before = fleet(4, 1)
    before.drain("v0", 0.0)
    before.drain("v1", 0.0, migrate_after_s=5.0)
    before.drain("v2", 0.0, migrate_after_s=0.0)
    report(before, "v3", 0.0, state="draining")
    before.pin("d0", ["v1", "v4"], 0.0)
    snapshot = Administration(before, 30.0, True).snapshot(1.0)
    after = Coordinator(LEASE_S, first_version=1_000)
    after.restore(snapshot, 50.0)
    for i in range(5):
        after.register(member(f"v{i}", "verifier"), 51.0)
    drains = [each.drain for each in after.snapshot(51.0).members]
    waits, moves = Draining(migrate=False, deadline_s=3.0), Draining(migrate=True, deadline_s=0.0)
    assert drains == [Draining(migrate=False), waits, moves, None, None], "who drains of itself will say so again"
    after.resume("v1", 52.0)
    after.register(member("d0", "drafter"), 52.0)
    assert pairs(after, 52.0) == {("v1", "d0"), ("v4", "d0")}


def test_many_members_are_assigned_a_loss_is_made_up_for_and_deciding_takes_milliseconds(timed: bool) -> None:
    verifiers = 1000 if timed else 200
    policy, spent = fleet(verifiers, 4 * verifiers), []
    for turn in range(1, 13):
        now = turn * DECIDE_EVERY_S
        began = time.process_time()
        policy.tick(now)
        spent.append(time.process_time() - began)
        for i in range(1, verifiers):
            report(policy, f"v{i}", now, running=i % 16)
        for i in range(4 * verifiers):
            report(policy, f"d{i}", now)
    bound = pairs(policy, now)
    assert {verifier for verifier, _ in bound} == {f"v{i}" for i in range(1, verifiers)}, "v0 never reported"
    assert {drafter for _, drafter in bound} == {f"d{i}" for i in range(4 * verifiers)}
    assert policy.counters["leases_expired"] == 1
    assert not timed or (statistics.median(spent) < 0.1 and max(spent) < 3.0)


NAMES = st.sampled_from([*(f"v{i}" for i in range(3)), *(f"d{i}" for i in range(4))])


class PolicyMachine(RuleBasedStateMachine):
    """Random lives of a small fleet.  `heard`, `incarnation` and `state` are what the policy has been told of members."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.now, self.version = Coordinator(LEASE_S, first_version=7), 0.0, 7
        self.heard: dict[str, float] = {}
        self.incarnation = Counter[str]()
        self.state: dict[str, MemberState] = {}
        self.generation = Counter[tuple[str, str]]()

    def known(self, name: str) -> bool:
        lease = START_LEASE_S if self.state.get(name) == "starting" else LEASE_S
        return name in self.heard and self.now - self.heard[name] <= lease

    @rule(name=NAMES, restart=st.booleans(), state=st.sampled_from(["starting", "ready"]))
    def register(self, name: str, restart: bool, state: MemberState) -> None:
        self.incarnation[name] += restart
        self.heard[name], self.state[name] = self.now, state
        kind: MemberKind = "verifier" if name.startswith("v") else "drafter"
        self.policy.register(member(name, kind, f"i{self.incarnation[name]}", state), self.now)

    @rule(name=NAMES, running=st.integers(0, 5), state=st.sampled_from(["ready", "ready", "draining"]))
    def report(self, name: str, running: int, state: MemberState) -> None:
        known = report(self.policy, name, self.now, running, f"i{self.incarnation[name]}", state).known
        assert known == self.known(name)
        if known:
            self.heard[name], self.state[name] = self.now, state

    @precondition(lambda self: self.heard)
    @rule(name=NAMES, late=st.booleans())
    def leave(self, name: str, late: bool) -> None:
        """`late`: an earlier incarnation says goodbye, which changes nothing."""
        self.policy.deregister(name, f"i{self.incarnation[name] - late}", self.now)
        if not late:
            self.heard.pop(name, None)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.0, 130.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def all_who_are_alive_are_assigned_and_nobody_else(self) -> None:
        live = {name for name in self.heard if self.known(name) and self.state[name] == "ready"}
        verifiers, drafters = ({name for name in live if name.startswith(letter)} for letter in "vd")
        bound = [(a.verifier_id, a.drafter_id) for a in self.policy.snapshot(self.now).assignments]
        assert len(bound) == len(set(bound))
        served = ({verifier for verifier, _ in bound}, {drafter for _, drafter in bound})
        assert served == ((verifiers, drafters) if verifiers and drafters else (set(), set()))

    @invariant()
    def generations_and_version_only_grow(self) -> None:
        snapshot = self.policy.snapshot(self.now)
        assert snapshot.version >= self.version
        self.version = snapshot.version
        for a in snapshot.assignments:
            pair = a.verifier_id, a.drafter_id
            assert self.generation[pair] <= a.generation <= snapshot.version
            self.generation[pair] = a.generation

    @invariant()
    def looking_changes_nothing(self) -> None:
        assert self.policy.snapshot(self.now) == self.policy.snapshot(self.now)


PolicyMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestPolicy = PolicyMachine.TestCase
