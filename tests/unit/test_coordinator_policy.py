"""The coordinator's policy: leases, generations, and who drafts for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.coordinator.policy import FORGET_LOST_S, LEND_AFTER_S, START_LEASE_S, Coordinator
from backend.fleet import DrafterStats, Member, MemberKind, MemberState, VerifierStats

LEASE_S = 2.0


def member(member_id: str, kind: MemberKind, incarnation: str = "i0", state: MemberState = "ready") -> Member:
    return Member(member_id, kind, incarnation, f"ipc:///tmp/{member_id}", "", "node", 1, "demo", state)


def verifier_stats(member_id: str, running: int) -> VerifierStats:
    return VerifierStats(member_id, 0.0, "sync", 4, running=running)


def fleet(verifiers: int, drafters: int, now: float = 0.0) -> Coordinator:
    policy = Coordinator(LEASE_S)
    for i in range(verifiers):
        policy.register(member(f"v{i}", "verifier"), now)
    for i in range(drafters):
        policy.register(member(f"d{i}", "drafter"), now)
    return policy


def pairs(policy: Coordinator, now: float) -> set[tuple[str, str]]:
    return {(a.verifier_id, a.drafter_id) for a in policy.snapshot(now).assignments}


def report(policy: Coordinator, member_id: str, now: float, running: int = 0, incarnation: str = "i0"):
    stats = verifier_stats(member_id, running) if member_id.startswith("v") else None
    return policy.report(member_id, incarnation, "ready", now, verifier=stats)


def test_drafters_go_to_the_verifier_with_the_fewest() -> None:
    assert pairs(fleet(2, 3), 0.0) == {("v0", "d0"), ("v1", "d1"), ("v0", "d2")}


def test_the_most_loaded_verifier_wins_a_tie() -> None:
    policy = fleet(2, 0)
    report(policy, "v0", 0.1, running=1)
    report(policy, "v1", 0.1, running=5)
    policy.register(member("d0", "drafter"), 0.2)
    assert pairs(policy, 0.2) == {("v1", "d0")}


def test_load_alone_moves_nothing_between_verifiers_that_have_drafters() -> None:
    policy = fleet(2, 2)
    before = policy.snapshot(0.0)
    for i in range(1, 20):
        for name in ("v0", "v1", "d0", "d1"):
            report(policy, name, i * 0.5, running=9 if name == "v1" else 0)
    after = policy.snapshot(9.5)
    assert after.assignments == before.assignments
    assert after.version == before.version


def test_a_verifier_that_comes_late_gets_its_share() -> None:
    policy = fleet(1, 2)
    generation = policy.snapshot(0.0).assignments[-1].generation
    policy.register(member("v1", "verifier"), 0.5)
    assert pairs(policy, 0.5) == {("v0", "d0"), ("v1", "d1")}
    assert max(a.generation for a in policy.snapshot(0.5).assignments) > generation


def test_an_idle_verifier_lends_its_drafter_to_a_working_one() -> None:
    policy = fleet(2, 1)
    assert pairs(policy, 0.0) == {("v0", "d0")}
    now = 0.0
    while now < LEND_AFTER_S - 0.5:
        now += 0.5
        report(policy, "v0", now)
        report(policy, "v1", now, running=3)
        report(policy, "d0", now)
        assert pairs(policy, now) == {("v0", "d0")}
    for _ in range(3):
        now += 0.5
        report(policy, "v0", now)
        report(policy, "v1", now, running=3)
        report(policy, "d0", now)
    assert pairs(policy, now) == {("v1", "d0")}


def test_members_that_are_not_ready_are_not_assigned() -> None:
    policy = fleet(1, 0)
    policy.register(member("d0", "drafter", state="starting"), 0.0)
    assert pairs(policy, 0.0) == set()
    orders = policy.report("d0", "i0", "ready", 0.1, drafter=DrafterStats("d0", 0.0))
    assert orders.known
    assert pairs(policy, 0.1) == {("v0", "d0")}
    policy.report("d0", "i0", "draining", 0.2)
    assert pairs(policy, 0.2) == set()


def test_a_starting_member_may_be_silent_for_longer() -> None:
    policy = fleet(1, 0)
    policy.register(member("d0", "drafter", state="starting"), 0.0)
    assert policy.report("d0", "i0", "starting", START_LEASE_S).known
    assert not policy.report("d0", "i0", "starting", 2.1 * START_LEASE_S).known


def test_an_address_learnt_later_makes_a_new_generation() -> None:
    policy = fleet(1, 1)
    old = policy.snapshot(0.0).assignments[0].generation
    moved = Member("d0", "drafter", "i0", "tcp://127.0.0.1:7", "", "node", 1, "demo", "ready")
    policy.register(moved, 0.5)
    (ref,) = report(policy, "v0", 0.6).drafters
    assert ref.address == "tcp://127.0.0.1:7"
    assert ref.generation > old
    assert policy.snapshot(0.6).counters["restarts"] == 0


def test_orders_name_the_drafter_and_its_generation() -> None:
    policy = fleet(1, 1)
    (ref,) = report(policy, "v0", 0.1).drafters
    assert (ref.id, ref.incarnation, ref.address) == ("d0", "i0", "ipc:///tmp/d0")
    assert ref.generation == policy.snapshot(0.1).assignments[0].generation
    assert report(policy, "d0", 0.1).drafters == []


def test_a_silent_member_is_lost_and_its_assignments_end() -> None:
    policy = fleet(1, 2)
    for now in (1.0, 2.0, 3.0):
        report(policy, "v0", now)
        report(policy, "d1", now)
    snapshot = policy.snapshot(3.0)
    assert {v.member.id: v.member.state for v in snapshot.members}["d0"] == "lost"
    assert pairs(policy, 3.0) == {("v0", "d1")}
    assert snapshot.counters["leases_expired"] == 1
    assert snapshot.counters["assignments_dropped"] == 1
    assert not report(policy, "d0", 3.1).known
    assert all(v.member.id != "d0" for v in policy.snapshot(FORGET_LOST_S + 1.0).members)


def test_a_restarted_member_is_counted_and_bound_anew() -> None:
    policy = fleet(1, 1)
    old = policy.snapshot(0.0).assignments[0].generation
    policy.register(member("d0", "drafter", incarnation="i1"), 0.5)
    snapshot = policy.snapshot(0.5)
    assert snapshot.counters["restarts"] == 1
    assert snapshot.assignments[0].generation > old
    assert not report(policy, "d0", 0.6).known
    assert report(policy, "v0", 0.6).drafters[0].incarnation == "i1"


def test_registering_again_unchanged_changes_nothing() -> None:
    policy = fleet(1, 1)
    before = policy.snapshot(0.0)
    policy.register(member("d0", "drafter"), 0.5)
    assert policy.snapshot(0.5).assignments == before.assignments
    assert policy.snapshot(0.5).version == before.version


def test_a_late_goodbye_of_an_old_incarnation_is_ignored() -> None:
    policy = fleet(1, 1)
    policy.register(member("d0", "drafter", incarnation="i1"), 0.5)
    policy.deregister("d0", "i0", 0.6)
    assert pairs(policy, 0.6) == {("v0", "d0")}
    policy.deregister("d0", "i1", 0.7)
    assert pairs(policy, 0.7) == set()


def test_draining_is_ordered_and_frees_the_drafter() -> None:
    policy = fleet(2, 1)
    assert policy.drain("v0", 0.1)
    assert report(policy, "v0", 0.2).drain
    assert pairs(policy, 0.2) == {("v1", "d0")}
    assert not policy.drain("nobody", 0.2)


@dataclass
class World:
    """What the policy has been told: the truth that its answers are held against."""

    heard: dict[str, float] = field(default_factory=dict)
    incarnation: dict[str, int] = field(default_factory=dict)
    state: dict[str, MemberState] = field(default_factory=dict)

    def alive(self, name: str, now: float) -> bool:
        return self.known(name, now) and self.state[name] == "ready"

    def known(self, name: str, now: float) -> bool:
        lease = START_LEASE_S if self.state.get(name) == "starting" else LEASE_S
        return name in self.heard and now - self.heard[name] <= lease


NAMES = st.sampled_from([*(f"v{i}" for i in range(3)), *(f"d{i}" for i in range(4))])


class PolicyMachine(RuleBasedStateMachine):
    """Random lives of a small fleet."""

    @initialize()
    def start(self) -> None:
        self.policy = Coordinator(LEASE_S, first_version=7)
        self.world = World()
        self.now = 0.0
        self.version = 7
        self.generation: dict[tuple[str, str], int] = {}

    @rule(name=NAMES, restart=st.booleans(), state=st.sampled_from(["starting", "ready"]))
    def register(self, name: str, restart: bool, state: MemberState) -> None:
        world = self.world
        world.incarnation[name] = world.incarnation.get(name, 0) + restart
        world.heard[name], world.state[name] = self.now, state
        kind: MemberKind = "verifier" if name.startswith("v") else "drafter"
        self.policy.register(member(name, kind, f"i{world.incarnation[name]}", state), self.now)

    @rule(name=NAMES, running=st.integers(0, 5), state=st.sampled_from(["ready", "ready", "draining"]))
    def report(self, name: str, running: int, state: MemberState) -> None:
        stats = verifier_stats(name, running) if name.startswith("v") else None
        incarnation = f"i{self.world.incarnation.get(name, 0)}"
        known = self.policy.report(name, incarnation, state, self.now, verifier=stats).known
        assert known == self.world.known(name, self.now)
        if known:
            self.world.heard[name], self.world.state[name] = self.now, state

    @precondition(lambda self: self.world.heard)
    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.policy.deregister(name, f"i{self.world.incarnation.get(name, 0)}", self.now)
        self.world.heard.pop(name, None)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.0, 130.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def assignments_are_sound(self) -> None:
        snapshot = self.policy.snapshot(self.now)
        drafters = [a.drafter_id for a in snapshot.assignments]
        assert len(drafters) == len(set(drafters)), "a drafter has two verifiers"
        for a in snapshot.assignments:
            assert self.world.alive(a.verifier_id, self.now)
            assert self.world.alive(a.drafter_id, self.now)

    @invariant()
    def no_live_drafter_is_left_out_and_shares_are_even(self) -> None:
        live = {n for n in self.world.heard if self.world.alive(n, self.now)}
        verifiers = [n for n in live if n.startswith("v")]
        assignments = self.policy.snapshot(self.now).assignments
        if verifiers:
            assert {a.drafter_id for a in assignments} == {n for n in live if n.startswith("d")}
            shares = [sum(a.verifier_id == v for a in assignments) for v in verifiers]
            assert max(shares) - min(shares) <= 1

    @invariant()
    def generations_and_version_only_grow(self) -> None:
        snapshot = self.policy.snapshot(self.now)
        assert snapshot.version >= self.version
        self.version = snapshot.version
        for a in snapshot.assignments:
            pair = a.verifier_id, a.drafter_id
            assert self.generation.get(pair, 0) <= a.generation <= snapshot.version
            self.generation[pair] = a.generation

    @invariant()
    def looking_changes_nothing(self) -> None:
        assert self.policy.snapshot(self.now) == self.policy.snapshot(self.now)


PolicyMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPolicy = PolicyMachine.TestCase
