"""Which places are lent, and when they come back: examples, and what holds for any load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config.settings import ElasticSettings
from backend.coordinator.lending import Lend, Lending, OnLoan, Scene

ON = ElasticSettings(enabled=True)
FIXED_S, SLOPE_S = 0.01, 0.001


@dataclass
class Bench:
    """Verifiers `v0`, `v1`, ... whose load the test sets, and loans that are carried out as told."""

    verifiers: int = 2
    settings: ElasticSettings = ON
    gain_of_drafter: float = 0.5
    """Over what one verifier makes, the first one; each further one adds half as much."""
    takes_s: float = 1.0
    """To lend a place, and to give it back."""
    now: float = 0.0
    load: dict[str, tuple[int, int]] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    loans: dict[str, float] = field(default_factory=dict)
    returning: dict[str, float] = field(default_factory=dict)
    wasted: set[str] = field(default_factory=set)
    lends: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lending = Lending(self.settings)

    @property
    def names(self) -> list[str]:
        return [f"v{i}" for i in range(self.verifiers) if f"v{i}" not in self.dead]

    @property
    def serving(self) -> list[str]:
        return [each for each in self.names if each not in self.loans and each not in self.returning]

    def worth(self, without: Collection[str], more: int, less: Collection[str]) -> float:
        drafters = sum(self.now - since >= self.takes_s for since in self.loans.values()) + more - len(less)
        return sum(1.0 for each in self.serving if sum(self.load.get(each, (0, 0)))) + self.gain_of_drafter * (
            2 - 0.5 ** (drafters - 1)
        )

    def step(self, seconds: float = 0.25) -> None:
        """Reports, then a decision, which is carried out."""
        self.now += seconds
        for verifier in self.names:
            running, waiting = self.load.get(verifier, (0, 0))
            self.lending.observe(verifier, self.now, running, waiting, FIXED_S + SLOPE_S * running, self.now)
        for verifier, since in list(self.returning.items()):
            if self.now - since >= self.takes_s:
                del self.returning[verifier]
                self.lending.ended(verifier, verifier in self.wasted, self.now)
                self.wasted.discard(verifier)
        loans = {v: OnLoan(f"d-{v}", "sleep", s if self.now - s >= self.takes_s else None) for v, s in self.loans.items()}
        scene = Scene(self.now, self.serving, loans, tuple(self.returning), self.blocked, self.worth)
        for action in self.lending.decide(scene):
            self.notes.append(action.note)
            if isinstance(action, Lend):
                assert action.verifier in self.serving
                self.loans[action.verifier] = self.now
                self.lends[action.verifier] += 1
            else:
                del self.loans[action.verifier]
                self.returning[action.verifier] = self.now
                self.wasted |= {action.verifier} if action.wasted else set()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.step()


def lent(bench: Bench) -> Bench:
    bench.load = {"v0": (1, 0)}
    bench.run(10)
    assert set(bench.loans) == {"v1"}
    return bench


def test_a_verifier_without_work_is_lent_after_a_while_and_not_before() -> None:
    bench = Bench()
    bench.load = {"v0": (1, 0)}
    bench.run(ON.idle_s)
    assert not bench.loans
    bench.step()
    assert set(bench.loans) == {"v1"}
    bench.run(60)
    assert bench.lends == {"v1": 1}


def test_nothing_is_lent_while_nobody_has_work_nor_for_too_small_a_gain_nor_below_the_minimum() -> None:
    for bench, load in (
        (Bench(), {}),
        (Bench(gain_of_drafter=0.05), {"v0": (1, 0)}),
        (Bench(verifiers=1), {}),
        (Bench(settings=ElasticSettings(min_serving=2)), {"v0": (1, 0)}),
        (Bench(blocked={"v1"}), {"v0": (1, 0)}),
    ):
        bench.load = load
        bench.run(60)
        assert not bench.lends


def test_a_verifier_that_helps_more_than_a_drafter_keeps_its_place() -> None:
    """48 requests on one verifier: two would nearly halve each step."""
    bench = Bench(gain_of_drafter=0.2)
    # Steps of other sizes were seen before.
    for requests in (1, 16, 48):
        bench.load = {"v0": (requests, 0)}
        bench.run(1)
    bench.run(60)
    assert not bench.lends
    bench.gain_of_drafter = 2.0
    bench.run(10)
    assert bench.lends


@pytest.mark.parametrize(
    ("load", "note"),
    [
        ({"v0": (1, 3)}, "requests queue"),
        ({"v0": (40, 0)}, "40 requests on 1 verifiers"),
        ({"v0": (1, 0), "v1": (0, 1)}, "it has requests"),
    ],
)
def test_load_takes_a_place_back_with_the_second_report(load: dict[str, tuple[int, int]], note: str) -> None:
    bench = lent(Bench())
    # Also one that was lent a moment ago.
    bench.load = load
    bench.step()
    bench.step()
    assert not bench.loans
    assert bench.notes[-1] == note


def test_one_report_with_waiting_requests_is_no_queue() -> None:
    bench = lent(Bench())
    for _ in range(20):
        bench.load = {"v0": (1, 1)}
        bench.step()
        bench.load = {"v0": (1, 0)}
        bench.step()
    assert bench.loans


def test_the_last_verifier_that_serves_dies_and_the_place_comes_back_at_once() -> None:
    bench = lent(Bench())
    bench.dead.add("v0")
    bench.step()
    assert not bench.loans
    assert bench.notes[-1] == "too few verifiers serve"


def test_a_command_about_the_verifier_takes_its_place_back() -> None:
    bench = lent(Bench())
    bench.blocked.add("v1")
    bench.step()
    assert not bench.loans


def test_without_work_anywhere_places_come_back_and_a_lull_is_not_held_against_them() -> None:
    bench = lent(Bench())
    bench.load = {}
    bench.run(ON.idle_s - 0.25)
    assert bench.loans
    bench.run(0.75)
    assert not bench.loans
    assert bench.notes[-1] == "nobody has work"
    bench.load = {"v0": (1, 0)}
    bench.run(ON.rest_s + ON.idle_s + 2)
    assert bench.loans


def test_a_drafter_that_adds_nothing_goes_and_is_tried_again_ever_more_rarely() -> None:
    bench = Bench()
    bench.load = {"v0": (1, 0)}
    at: list[float] = []
    while len(at) < 5:
        # It promises something each time, and then turns out to be worth nothing.
        bench.gain_of_drafter = 0.0 if bench.loans else 0.5
        bench.step()
        if bench.lends["v1"] > len(at):
            at.append(bench.now)
        assert bench.now < 1000
    assert bench.notes[-2] == "its drafter adds too little"
    apart = [after - before for before, after in pairwise(at)]
    assert all(1.5 * before < after < 2.1 * before for before, after in pairwise(apart))


def test_what_failed_rests_twice_as_long_each_time() -> None:
    lending = Lending(ON)
    rests = []
    for _ in range(8):
        lending.ended("v0", True, 0.0)
        rests.append(lending._rests_until["v0"])
    assert rests == [ON.rest_s * factor for factor in (2, 4, 8, 16, 32, 32, 32, 32)]
    lending.ended("v0", False, 0.0)
    assert lending._rests_until["v0"] == ON.rest_s


def test_several_places_are_lent_while_each_one_more_is_worth_it() -> None:
    bench = Bench(verifiers=8, gain_of_drafter=1.0)
    bench.load = {"v0": (8, 0)}
    bench.run(20)
    # Gains of 1/2, 1/4, 1/8 over what is made so far; one more verifier would add a little too.
    assert 2 <= len(bench.loans) < 7


loads = st.dictionaries(st.sampled_from([f"v{i}" for i in range(4)]), st.tuples(st.integers(0, 40), st.integers(0, 3)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(loads, st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.floats(0, 2),
    st.integers(0, 10_000),
)
def test_whatever_the_load_enough_verifiers_serve_and_places_rest(
    phases: list[tuple[dict[str, tuple[int, int]], int]], min_serving: int, gain: float, seed: int
) -> None:
    bench = Bench(verifiers=4, settings=ElasticSettings(enabled=True, min_serving=min_serving), gain_of_drafter=gain)
    dice = random.Random(seed)
    lent_at: dict[str, float] = {}
    for load, steps in phases:
        bench.load = dict(load)
        bench.gain_of_drafter = gain * dice.random()
        for _ in range(steps):
            before = Counter(bench.lends)
            bench.step()
            assert len(bench.serving) + len(bench.returning) >= min_serving
            assert len(bench.serving) >= min(min_serving, 4 - len(bench.returning) - len(bench.loans))
            for verifier in bench.lends - before:
                last = lent_at.get(verifier)
                assert last is None or bench.now - last >= ON.rest_s
                lent_at[verifier] = bench.now


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(0, 1000))
def test_under_a_steady_load_nothing_goes_back_and_forth(load: dict[str, tuple[int, int]], seed: int) -> None:
    bench = Bench(verifiers=4)
    dice = random.Random(seed)
    for _ in range(4 * 120):
        # Reports jitter by a request.
        bench.load = {key: (max(n + dice.choice((-1, 0, 0, 1)), 1) if n else 0, 0) for key, (n, _) in load.items()}
        bench.step()
    assert all(count <= 3 for count in bench.lends.values()), bench.notes


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 64), st.floats(0, 30))
def test_a_queue_brings_every_place_back_within_a_second(verifiers: int, queue: int, quiet_s: float) -> None:
    bench = Bench(verifiers=verifiers, gain_of_drafter=1.0, takes_s=0.25)
    bench.load = {"v0": (4, 0)}
    bench.run(5 + quiet_s)
    bench.load = dict.fromkeys(bench.serving, (4, queue))
    bench.run(1.0)
    assert not bench.loans
