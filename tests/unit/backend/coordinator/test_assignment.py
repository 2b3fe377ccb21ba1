"""The assignment rule: near the best possible, steady under noise, and never against pins, dwell or anybody's service.

And what the coordinator makes of cumulative counters.
"""

import copy
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.coordinator.assignment import Pair, Situation, VerifierLoad
from backend.coordinator.policy import Coordinator
from backend.coordinator.water_filling import Assigning, decide
from backend.fleet import DraftCounters, DrafterStats, Member, MemberKind, VerifierStats
from backend.fleet.speed import Speed
from tests.support.properties import examples

FEW = examples(30)


@st.composite
def situations(draw: st.DrawFn, verifiers: int = 6, drafters: int = 8) -> Situation:
    """Fleets in mode `auto`, of drafters more or less alike."""
    return fleet(draw(st.integers(1, verifiers)), draw(st.integers(1, drafters)), draw(st.integers(0, 1 << 30)))


def fleet(verifiers: int, drafters: int, seed: int, spread: float | None = None) -> Situation:
    dice = random.Random(seed)
    spread = dice.choice([0, 0.1, 0.5]) if spread is None else spread
    loads, speeds = [], []
    for _ in range(verifiers):
        requests = dice.choice([0, 1, 2, 4, 8, 16, 32])
        plain = dice.uniform(0.01, 0.05) * (1 + 0.02 * requests)
        length, overlap = dice.uniform(1.2, 4.5), dice.choice([0, 0, 0.5, 1])
        loads.append(VerifierLoad(requests, plain, plain * dice.uniform(1, 2), length, overlap))
    fixed, per_request = dice.uniform(0.001, 0.03), dice.uniform(0, 0.003)
    for _ in range(drafters):
        slower = 1 + spread * dice.uniform(-1, 1)
        speeds.append(Speed(fixed * slower, per_request * slower))
    return situation_of(loads, speeds)


def situation_of(loads: Sequence[VerifierLoad], speeds: Sequence[Speed]) -> Situation:
    """The fleet of v0, v1, ... and d0, d1, ..."""
    return Situation(0.0, {f"v{i}": load for i, load in enumerate(loads)}, {f"d{i}": speed for i, speed in enumerate(speeds)})


def predicted(situation: Situation, pairs: Iterable[Pair]) -> float:
    """Predicted tokens per second of the fleet with this assignment."""
    fleet = Assigning(replace(situation, bindings=dict.fromkeys(pairs, 0.0), pins={}))
    return fleet._total(situation.verifiers)


def changed(bindings: dict[Pair, float], wanted: set[Pair], now: float) -> dict[Pair, float]:
    return {pair: bindings.get(pair, now) for pair in wanted}


def settle(situation: Situation, bindings: dict[Pair, float] | None = None, min_gain: float = 0.05) -> dict[Pair, float]:
    """Decides until nothing changes."""
    bindings, now = dict(bindings or {}), 100.0
    for _ in range(60):
        wanted = decide(replace(situation, now=now, bindings=bindings), min_gain)
        if wanted == bindings.keys():
            return bindings
        bindings = changed(bindings, wanted, now)
        now += 10
    raise AssertionError("it does not settle")


def partitions(situation: Situation, first: int = 0) -> Iterator[list[Pair]]:
    """Every way of giving each drafter to one verifier."""
    if first == len(situation.drafters):
        yield []
        return
    for rest in partitions(situation, first + 1):
        for verifier in situation.verifiers:
            yield [(verifier, list(situation.drafters)[first]), *rest]


def test_near_the_best_partition() -> None:
    dice, shares = random.Random(0), []
    for seed in range(60):
        situation = fleet(dice.randint(1, 4), dice.randint(1, 5), seed)
        best = max(predicted(situation, pairs) for pairs in partitions(situation))
        shares.append(predicted(situation, settle(situation)) / best)
    assert statistics.mean(shares) >= 0.99
    assert min(shares) >= 0.85


def test_where_drafts_do_not_pay_the_verifier_without_a_drafter_gets_the_free_one() -> None:
    loads = [VerifierLoad(requests, 0.01, 0.1, 1.1) for requests in (16, 2)]
    situation = replace(situation_of(loads, [Speed(0.01, 0.001)] * 2), bindings={("v0", "d0"): 0.0})
    assert decide(situation) == {("v0", "d0"), ("v1", "d1")}


@FEW
@given(situations(4, 5), st.integers(0, 1 << 30))
def test_a_bad_assignment_is_left_behind(situation: Situation, seed: int) -> None:
    """From any start, hysteresis costs a little and no more."""
    dice = random.Random(seed)
    start = {(dice.choice(list(situation.verifiers)), each): 0.0 for each in situation.drafters}
    got = predicted(situation, settle(situation, start))
    assert got >= 0.8 * max(predicted(situation, pairs) for pairs in partitions(situation))


@FEW
@given(situations(12, 16))
def test_every_drafter_is_used_and_who_is_left_alone_would_not_gain(situation: Situation) -> None:
    bindings = settle(situation)
    assert {d for _, d in bindings} == situation.drafters.keys()
    for bare in situation.verifiers.keys() - {v for v, _ in bindings}:
        joined = [predicted(situation, [*bindings, (bare, each)]) for each in situation.drafters]
        assert min(joined) <= predicted(situation, bindings)


@FEW
@given(situations(), st.data())
def test_dwell_is_respected_whatever_the_load_does(situation: Situation, data: st.DataObject) -> None:
    bindings, now = dict[Pair, float](), 0.0
    for _ in range(12):
        now += data.draw(st.sampled_from([0.5, 1.0, 6.0]))
        loads = {
            name: replace(load, requests=data.draw(st.sampled_from([0, 1, 8, 64])))
            for name, load in situation.verifiers.items()
        }
        wanted = decide(replace(situation, now=now, verifiers=loads, bindings=bindings), min_dwell_s=5.0)
        assert all(now - bindings[pair] >= 5.0 for pair in bindings.keys() - wanted)
        bindings = changed(bindings, wanted, now)


@FEW
@given(situations(), st.data())
def test_pins_hold(situation: Situation, data: st.DataObject) -> None:
    verifiers = [*situation.verifiers, "unknown"]
    drafters = [*situation.drafters, "unknown"]
    pins = data.draw(st.dictionaries(st.sampled_from(drafters), st.lists(st.sampled_from(verifiers), unique=True), max_size=4))
    bindings = settle(replace(situation, pins=pins))
    for drafter, wanted in pins.items():
        if drafter != "unknown":
            assert {v for v, d in bindings if d == drafter} == set(wanted) - {"unknown"}
    assert {d for _, d in bindings} >= situation.drafters.keys() - pins.keys()


def test_a_verifier_that_does_better_by_itself_leaves_its_drafters_to_the_other() -> None:
    """From one drafter each, and from both at it: one alone of them makes no difference."""
    loads = [VerifierLoad(8, 0.02, 0.03, 4.0, bare_s=bare_s) for bare_s in (0.004, 0.02)]
    situation = situation_of(loads, [Speed(0.006, 0.002)] * 2)
    for start in ({("v0", "d0"): 0.0, ("v1", "d1"): 0.0}, {("v0", "d0"): 0.0, ("v0", "d1"): 0.0}, {}):
        assert settle(situation, start).keys() == {("v1", "d0"), ("v1", "d1")}


def test_a_drafter_that_is_down_for_a_verifier_drafts_for_others() -> None:
    loads = [VerifierLoad(8, 0.03, 0.04, 2.5, down=frozenset({"d0"})), VerifierLoad(0)]
    bindings: dict[Pair, float] = {("v0", "d0"): 0.0, ("v0", "d1"): 0.0, ("v1", "d2"): 0.0}
    after = settle(situation_of(loads, [Speed(0.006, 0.001)] * 3), bindings)
    assert ("v0", "d0") not in after
    assert {("v1", "d0"), ("v0", "d2")} <= after.keys()
    idle = [VerifierLoad(0, down=frozenset({"d1"} if i == 3 else ())) for i in range(4)]
    after = settle(situation_of(idle, [Speed(0.006, 0.001)] * 2), {(f"v{i}", "d0"): 0.0 for i in range(4)})
    assert ("v3", "d1") not in after
    assert [sum(d == drafter for _, d in after) for drafter in ("d0", "d1")] == [2, 2]


def test_busy_verifiers_share_evenly_whatever_the_idle_ones_have() -> None:
    """5 verifiers on 2 drafters: after an idle phase, any of them become busy."""
    speeds = [Speed(0.01, 0.001)] * 2
    idle = VerifierLoad(0, 0.02, 0.025, 2.5)
    before = dict.fromkeys(settle(situation_of([idle] * 5, speeds)), 0.0)
    for busy in itertools.product([0, 8], repeat=5):
        situation = situation_of([replace(idle, requests=requests) for requests in busy], speeds)
        pairs = settle(situation, before)
        for counted in (lambda requests: requests > 0, lambda requests: True):
            numbers = [sum(drafter == each and counted(busy[int(v[1:])]) for v, drafter in pairs) for each in ("d0", "d1")]
            assert abs(numbers[0] - numbers[1]) <= 1, (busy, sorted(pairs))


def test_no_change_without_the_gain_that_was_asked_for() -> None:
    situation = situation_of([VerifierLoad(requests, 0.03, 0.04, 2.5) for requests in (16, 4)], [Speed(0.006, 0.001)] * 4)
    start: dict[Pair, float] = {("v0" if i == 0 else "v1", f"d{i}"): 0.0 for i in range(4)}
    assert settle(situation, start, min_gain=0.01) != start
    assert settle(situation, start, min_gain=0.9) == start, "no gain is that large"


class Fleet:
    """A fleet behind a coordinator, whose members report what they do four times a second, with ten percent of noise."""

    def __init__(self, loads: list[int], drafters: int, seed: int) -> None:
        self.policy, self.now, self.dice = Coordinator(2.0), 0.0, random.Random(seed)
        self.loads = loads
        self.counted = [DraftCounters() for _ in loads]
        self.drafters = [f"d{i}" for i in range(drafters)]
        kinds: dict[str, MemberKind] = dict.fromkeys(self.drafters, "drafter")
        kinds.update({f"v{i}": "verifier" for i in range(len(loads))})
        for name, kind in kinds.items():
            self.policy.register(Member(name, kind, "i", "ipc:///x", "", "n", 1, "demo", "ready"), 0.0)

    def run(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self.now += 0.25
            for i in range(len(self.loads)):
                self._report(f"v{i}", self._verifier(i))
            for name in self.drafters:
                self._report(name, DrafterStats(name, 0.0, speed=Speed(self._noisy(0.002), self._noisy(0.004))))

    def served(self) -> list[str]:
        """The verifier of each drafter."""
        return [each.verifier_id for each in self.policy.snapshot(self.now).assignments]

    def _report(self, name: str, stats: VerifierStats | DrafterStats) -> None:
        assert self.policy.report(name, "i", stats, "ready", self.now).known

    def _noisy(self, value: float) -> float:
        return value * self.dice.uniform(0.9, 1.1)

    def _verifier(self, i: int) -> VerifierStats:
        requests, step_s, counters = round(self._noisy(self.loads[i])), 0.03 + 0.0005 * self.loads[i], self.counted[i]
        counters.drafts += 5 * requests
        counters.accepted_tokens += round(self._noisy(1.4 * 5 * requests))
        plain_s, drafted_s, drafters = self._noisy(step_s), self._noisy(1.25 * step_s), {"d0": copy.copy(counters)}
        return VerifierStats(
            f"v{i}", 0.0, "auto", 4, running=requests, drafters=drafters, plain_step_s=plain_s, drafted_step_s=drafted_s
        )


def test_ten_percent_of_noise_moves_hardly_anything_in_a_steady_state() -> None:
    dice = random.Random(5)
    moved = []
    for _ in range(8):
        loads = [dice.choice([0, 1, 4, 8, 16, 32]) for _ in range(dice.randint(1, 5))]
        fleet, counts = Fleet(loads, dice.randint(1, 8), dice.randrange(1 << 30)), []
        for seconds in (20, 60):
            fleet.run(seconds)
            counts.append(fleet.policy.snapshot(fleet.now).counters["reassignments"])
        moved.append(counts[1] - counts[0])
    assert sum(moved) <= 0.5 * len(moved), f"reassignments in a minute of steady load: {moved}"
    assert max(moved) <= 6


def test_what_changes_for_good_is_followed_within_seconds() -> None:
    fleet = Fleet([16, 1], 4, 0)
    for loads, seconds, busy in (([16, 1], 20, "v0"), ([1, 16], 15, "v1")):
        fleet.loads = loads
        fleet.run(seconds)
        assert fleet.served().count(busy) > len(fleet.served()) / 2


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


def test_a_verifiers_load_speed_and_acceptance_and_what_its_plan_hides_behind_verification() -> None:
    load = VerifierLoad()
    for i in range(40):
        counters = {"d0": DraftCounters(10 * i, accepted_tokens=20 * i), "d1": DraftCounters(10 * i, accepted_tokens=10 * i)}
        counters["lookup"] = DraftCounters(50 * i, accepted_tokens=200 * i)
        speeds = {"plain_step_s": 0.03, "drafted_step_s": 0.04}
        load.observe(stats(4, 25 * i, **speeds, drafters=counters, drafters_down=["d1"] if i > 5 else []), 0.25 * i)
    assert load.requests == 4
    assert (load.plain_s, load.drafted_s, load.length) == pytest.approx((0.03, 0.04, 2.5))
    assert (load.may_skip, set(load.down), load.overlap) == (True, {"d1"}, 0)
    ahead = {"d0": DraftCounters(400, accepted_tokens=800, ahead_hits=30, ahead_misses=10)}
    load.observe(stats(4, 1000, plan_outcomes=8, drafters=ahead, drafters_down=[]), 10.0)
    assert (load.down, load.overlap) == (frozenset(), 0.75)


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
