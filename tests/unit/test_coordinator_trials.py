"""Reassignments that made things worse are taken back, and others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from backend.config.settings import CoordinatorSettings
from backend.coordinator.assignment import Action, Bind, Decision, Pair, Situation, Unbind
from backend.coordinator.entries import beside
from backend.coordinator.policy import Coordinator
from backend.coordinator.trials import FIRST_HOLD_S, SETTLE_S, Trials
from backend.fleet import DrafterStats, Member, MemberKind, VerifierStats

WATCH_S = 6.0
MOVE: list[Action] = [Unbind("v1", "d1"), Bind("v0", "d1")]
PAIRS = frozenset({("v1", "d1"), ("v0", "d1")})


class Reports:
    """Two verifiers that report four times a second."""

    def __init__(self, trials: Trials) -> None:
        self.trials, self.now, self.tokens = trials, 100.0, dict.fromkeys(("v0", "v1"), 0.0)

    def go_on(self, seconds: float, rates: tuple[float, float], requests: tuple[int, int] = (8, 1)) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            for name, rate, held in zip(self.tokens, rates, requests, strict=True):
                self.tokens[name] += rate / 4
                self.trials.observe(name, 0.0, round(self.tokens[name]), held, self.now)

    def move(self) -> None:
        self.trials.begin(MOVE, lambda drafter: (), self.now)
        self.trials.changed(MOVE, self.now)


def reports(watch_s: float = WATCH_S) -> Reports:
    found = Reports(Trials(watch_s))
    found.go_on(20, (800, 200))
    return found


def test_what_made_less_is_taken_back_and_left_alone_for_longer_and_longer() -> None:
    world = reports()
    for hold_s in (FIRST_HOLD_S, 2 * FIRST_HOLD_S, 4 * FIRST_HOLD_S):
        world.move()
        assert world.trials.frozen() == {"v0", "v1"}
        world.go_on(SETTLE_S + WATCH_S - 0.5, (850, 50))
        assert world.trials.judge(world.now) == []
        world.go_on(0.5, (850, 50))
        assert world.trials.judge(world.now) == [Unbind("v0", "d1"), Bind("v1", "d1")]
        world.trials.changed(MOVE, world.now)
        assert world.trials.frozen() == frozenset()
        world.go_on(hold_s - 1, (800, 200))
        assert world.trials.settled(world.now) == PAIRS
        world.go_on(2, (800, 200))
        assert world.trials.settled(world.now) == frozenset()


@pytest.mark.parametrize(
    ("rates", "requests"),
    [
        ((850, 160), (8, 1)),  # more in all
        ((780, 200), (8, 1)),  # less, but within what noise may do
        ((650, 190), (6, 1)),  # fewer requests: fewer tokens, but more for each
        ((850, 200), (10, 1)),  # more requests: fewer tokens for each, but more in all
    ],
)
def test_what_did_not_make_less_stays(rates: tuple[float, float], requests: tuple[int, int]) -> None:
    world = reports()
    world.move()
    world.go_on(SETTLE_S + WATCH_S, rates, requests)
    assert world.trials.judge(world.now) == []
    assert not world.trials.frozen()
    assert not world.trials.settled(world.now)


def test_another_load_ends_a_trial_without_a_verdict_and_suspends_one() -> None:
    world = reports()
    world.move()
    world.go_on(SETTLE_S + 1, (300, 20), (2, 1))
    assert world.trials.judge(world.now) == []
    assert world.trials.frozen() == frozenset()
    world = reports()
    world.move()
    world.go_on(SETTLE_S + WATCH_S, (500, 20))
    assert world.trials.judge(world.now)
    world.go_on(SETTLE_S + 1, (500, 0), (8, 0))
    assert world.trials.settled(world.now) == frozenset()
    world.go_on(SETTLE_S + 1, (500, 20))
    assert world.trials.settled(world.now) == PAIRS


def test_without_knowing_what_was_made_before_nothing_is_judged() -> None:
    world = Reports(Trials(WATCH_S))
    world.go_on(2, (800, 200))
    world.move()
    assert world.trials.frozen() == frozenset()
    world.go_on(SETTLE_S + WATCH_S, (100, 100))
    assert world.trials.judge(world.now) == []
    world = reports(watch_s=0)
    world.move()
    assert world.trials.frozen() == frozenset()


def test_a_verifier_that_restarts_ends_its_trial() -> None:
    world = reports()
    world.move()
    world.trials.observe("v1", 5.0, 0, 1, world.now)
    assert world.trials.frozen() == frozenset()


def test_a_drafter_that_has_to_leave_ends_a_trial() -> None:
    world = reports()
    world.move()
    world.go_on(1, (800, 200))
    world.trials.changed([Unbind("v0", "d0")], world.now)
    assert not world.trials.frozen()


def test_those_beside_the_drafter_count_and_moves_apart_are_judged_apart() -> None:
    trials, now = Trials(WATCH_S), 0.0
    tokens = dict.fromkeys((f"v{i}" for i in range(5)), 0)
    for i in range(120):
        now = i / 4
        if i == 80:
            moves: list[Action] = [Unbind("v1", "d1"), Bind("v0", "d1"), Unbind("v3", "d3"), Bind("v2", "d3")]
            trials.begin(moves, lambda drafter: ["v4"] if drafter == "d1" else [], now)
            assert trials.frozen() == set(tokens)
        for name in tokens:
            # Only the one beside loses.
            tokens[name] += 10 if name == "v4" and i >= 80 else 100
            trials.observe(name, 0.0, tokens[name], 4, now)
    assert trials.judge(now) == [Unbind("v0", "d1"), Bind("v1", "d1")]


def test_beside_a_drafter_are_those_on_its_cores_of_its_node() -> None:
    policy = Coordinator(60.0)
    for name, node, cores in (
        ("v0", "n", (0,)),
        ("v1", "n", (1,)),
        ("v2", "other", (1,)),
        ("v3", "n", ()),
        ("d0", "n", (1, 2)),
    ):
        kind: MemberKind = "verifier" if name[0] == "v" else "drafter"
        policy.register(Member(name, kind, "i", "ipc://", "", "", 0, "demo", "ready", node_id=node, cores=cores), 0.0)
    entries = policy._entries
    assert beside(entries, "d0") == ["v1"]
    policy.register(Member("d1", "drafter", "i", "ipc://", "", "", 0, "demo", "ready", node_id="n"), 0.0)
    assert beside(entries, "d1") == [], "on a GPU it shares cores with nobody"


class _Gathers:
    """A rule that soon gives everything to v0, as far as it may."""

    def decide(self, situation: Situation) -> Decision:
        actions: list[Bind | Unbind] = []
        for drafter in ("d0", "d1"):
            pair = ("v0", drafter)
            if not situation.bindings:
                actions.append(Bind(f"v{drafter[1]}", drafter))
            elif (
                situation.now > 15 and pair not in situation.bindings and pair not in situation.settled and not situation.frozen
            ):
                actions += [Unbind("v1", drafter), Bind(*pair)]
        return Decision(actions)


def drive(rates: Callable[[Mapping[Pair, float]], tuple[float, float]], seconds: float) -> Coordinator:
    """A coordinator whose verifiers make what `rates` says of the assignment."""
    policy = Coordinator(60.0, settings=CoordinatorSettings(), rule=_Gathers())
    for kind, name in (("verifier", "v0"), ("verifier", "v1"), ("drafter", "d0"), ("drafter", "d1")):
        known: MemberKind = "verifier" if kind == "verifier" else "drafter"
        policy.register(Member(name, known, "i", "ipc://", "", "here", 0, "demo", "starting"), 0.0)
    for name in ("v0", "v1", "d0", "d1"):
        policy.report(name, "i", "ready", 0.0)
    tokens, now = {"v0": 0.0, "v1": 0.0}, 0.0
    while now < seconds:
        now += 0.25
        bound = {(each.verifier_id, each.drafter_id): 0.0 for each in policy.snapshot(now).assignments}
        for name, rate in zip(tokens, rates(bound), strict=True):
            tokens[name] += rate / 4
            stats = VerifierStats(name, 0.0, "auto", 4, running=8, tokens=round(tokens[name]))
            policy.report(name, "i", "ready", now, verifier=stats)
        for name in ("d0", "d1"):
            policy.report(name, "i", "ready", now, drafter=DrafterStats(name, 0.0))
    return policy


def test_the_coordinator_takes_back_what_harms_and_does_not_flap() -> None:
    def rates(bound: Mapping[Pair, float]) -> tuple[float, float]:
        return (820, 100) if ("v0", "d1") in bound else (800, 400)

    policy = drive(rates, 300)
    snapshot = policy.snapshot(300.0)
    assert 2 <= snapshot.counters["taken_back"] <= 4
    assert snapshot.counters["reassignments"] <= 2 * snapshot.counters["taken_back"] + 1


def test_the_coordinator_keeps_what_helps() -> None:
    def rates(bound: Mapping[Pair, float]) -> tuple[float, float]:
        return (1200, 300) if ("v0", "d1") in bound else (800, 400)

    policy = drive(rates, 120)
    snapshot = policy.snapshot(120.0)
    assert snapshot.counters["taken_back"] == 0
    assert {(each.verifier_id, each.drafter_id) for each in snapshot.assignments} == {("v0", "d0"), ("v0", "d1")}
