"""Assigns each drafter where one more gains the most tokens per second (water-filling).  Pure.

A verifier with n requests and a drafters sends each of them n / a requests per step.  From what members report, its speed is
predicted as

    draft  = fixed + per_request * n / a        for typical drafters; longer if it has less than one
    cycle  = verify + draft - overlap * min(verify, draft)
    tokens per second = n * acceptance length / cycle,      or n / plain step if that is more and it may skip drafts

and without drafters from its plain steps or look-ups.  A drafter counts by its speed: one half as fast as the typical one is a
half.  A shared drafter counts for less: it is busy half of the time if another verifier has as many requests.  Values that were
not measured yet are taken from the other members.

Free drafters are placed one after the other.  Then drafters move, while a move gains at least the share `min_gain` of what both
verifiers make.  A drafter that was bound less than `min_dwell_s` ago stays: measurements are noisy, and a new drafter costs
each request one opening.  A verifier without a drafter shares the drafter with the fewest verifiers, unless it is faster alone,
or all verifiers of that drafter together lose more than `min_gain`.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from backend.coordinator.assignment import Action, Bindings, DrafterSpeed, Pair, Situation, VerifierLoad

PLAIN_S, DRAFTED, LENGTH, FIXED_S, PER_REQUEST_S = 0.03, 1.2, 2.0, 5e-3, 5e-4
"""Before any measurement: plain step, drafted step relative to it, acceptance length, a round's fixed time and per request."""
IDLE, ACTIVE = 0.1, 0.5
"""An idle verifier counts as having 0.1 requests; from 0.5 on it counts as active."""
CAPACITY = 0.1, 4.0
"""Least and most that a drafter counts for, relative to a typical one."""
TOGETHER = 1, 2, 4, 8, 16
"""Numbers of further drafters that are tried: one more may be worth nothing where several are worth much."""
UNSKIPPED = 0.01
"""Share of the drafted speed that counts even where drafts do not pay.  Without it, such assignments would all look equal."""
MOVES = 8
"""Most moves in one decision."""


@dataclass(frozen=True)
class WaterFilling:
    """The rule described in the module's docstring."""

    min_gain: float = 0.05
    min_dwell_s: float = 5.0

    def decide(self, situation: Situation) -> list[Action]:
        """Places free drafters, moves drafters, shares them."""
        fleet = _Fleet(situation)
        if situation.verifiers and situation.drafters:
            fleet.place()
            for _ in range(MOVES):
                if not fleet.move(self.min_gain, situation.now - self.min_dwell_s):
                    break
            fleet.share(self.min_gain)
            fleet.stop_needless_sharing(situation.now - self.min_dwell_s)
        return fleet.bindings.actions()


def predicted(situation: Situation, pairs: Iterable[Pair]) -> float:
    """Predicted tokens per second of the fleet with this assignment."""
    return _Fleet(replace(situation, bindings=dict.fromkeys(pairs, 0.0), pins={})).total()


class _Fleet:
    """The state of one decision."""

    def __init__(self, situation: Situation) -> None:
        self.bindings = Bindings(situation)
        drafters = situation.drafters
        self._fixed_s = _usual((each.fixed_s for each in drafters), FIXED_S)
        self._per_request_s = _usual((each.per_request_s for each in drafters), PER_REQUEST_S)
        requests = sum(each.requests for each in situation.verifiers) / max(len(drafters), 1)
        self._capacity = {each.id: self._capacity_of(each, requests) for each in drafters}
        self._down = {each.id: each.down_for for each in drafters if each.down_for}
        self._loads = _completed(situation.verifiers)
        self._active = {each.id for each in situation.verifiers if each.requests >= ACTIVE}
        self._held = {each.id: self._count(each.id) for each in situation.verifiers}

    def total(self) -> float:
        """Predicted tokens per second."""
        return sum(self._worth(verifier, held, 0.0) for verifier, held in self._held.items())

    # -- the steps -----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Binds the free drafters, fastest first."""
        free = sorted(self.bindings.free(), key=lambda each: -self._capacity[each])
        needs = [(*self._need(verifier), verifier) for verifier in self._held]
        heapq.heapify(needs)
        for drafter in free:
            passed = []
            while needs[0][-1] in self._down.get(drafter, ()) and len(needs) > 1:
                passed.append(heapq.heappop(needs))
            verifier = needs[0][-1]
            self._bind(verifier, drafter)
            heapq.heapreplace(needs, (*self._need(verifier), verifier))
            for need in passed:
                heapq.heappush(needs, need)

    def move(self, min_gain: float, bound_before: float) -> bool:
        """Makes the best move, of one drafter or of all drafters of a verifier.  False if no move pays."""
        offers = [(giver, leaving) for giver in self._held for leaving in self._leaving(giver, bound_before)]
        takers = {size: self._takers(1 << size) for size in {len(leaving).bit_length() - 1 for _, leaving in offers}}
        best: tuple[float, str, str, list[str]] | None = None
        for giver, leaving in offers:
            for taker in takers[len(leaving).bit_length() - 1]:
                if taker != giver and not any(taker in self._down.get(each, ()) for each in leaving):
                    gain, now = self._gain(giver, taker, leaving)
                    if gain > max(min_gain * now, best[0] if best is not None else 0.0):
                        best = gain, giver, taker, leaving
                    break
        if best is None:
            return False
        _, giver, taker, leaving = best
        for drafter in leaving:
            self._unbind(giver, drafter)
            self._bind(taker, drafter)
        return True

    def _leaving(self, giver: str, bound_before: float) -> list[list[str]]:
        """What `giver` may give away: its slowest movable drafter, and all of them.  Shared drafters do not count."""
        may = [each for each in self._movable(giver, bound_before) if len(self.bindings.of_drafter[each]) == 1]
        slowest = sorted(may, key=lambda each: (each not in self._down, self._capacity[each]))[:1]
        return [slowest, may] if len(may) > 1 else [may] if may else []

    def _gain(self, giver: str, taker: str, leaving: list[str]) -> tuple[float, float]:
        """The gain of a move, and the present speed of both verifiers.  A giver of its last drafter will share the taker's."""
        giver_held, taker_held = self._held[giver], self._held[taker] + sum(self._capacity[each] for each in leaving)
        now = self._worth(giver, giver_held) + self._worth(taker, self._held[taker])
        less = giver_held - sum(self._part(giver, each) for each in leaving)
        if len(leaving) == len(self.bindings.of_verifier[giver]):
            busy = self._loads[taker].requests / (self._loads[taker].requests + self._loads[giver].requests)
            less = 1 / (1 + busy) if self._worth(giver, 1 / (1 + busy)) > self._worth(giver, 0.0) else 0.0
            taker_held -= 1 - 1 / (2 - busy) if less else 0.0
        return self._worth(giver, less) + self._worth(taker, taker_held) - now, now

    def share(self, most_lost: float) -> None:
        """Has verifiers without a drafter share one, those with the most requests first."""
        shared = [(self._sharers(each), each) for each in self.bindings.of_drafter if each not in self.bindings.pins]
        heapq.heapify(shared)
        for verifier in sorted(self.bindings.bare(), key=lambda each: (-self._loads[each].requests, each)):
            passed = []
            while shared and verifier in self._down.get(shared[0][1], ()):
                passed.append(heapq.heappop(shared))
            if not shared:
                return
            drafter = shared[0][1]
            ends = [*self.bindings.of_drafter[drafter], verifier]
            before = sum(self._worth(each, self._held[each], 0.0) for each in ends)
            self._bind(verifier, drafter)
            gained = self._worth(verifier, self._held[verifier], 0.0) > self._worth(verifier, 0.0, 0.0)
            after = sum(self._worth(each, self._held[each], 0.0) for each in ends)
            if verifier in self._active and not (gained and after >= (1 - most_lost) * before):
                self._unbind(verifier, drafter)
            heapq.heapreplace(shared, (self._sharers(drafter), drafter))
            for each in passed:
                heapq.heappush(shared, each)

    def stop_needless_sharing(self, bound_before: float) -> None:
        """Has verifiers with a drafter of their own leave shared ones, unless that costs speed.  Then evens out sharing."""
        of_drafter = self.bindings.of_drafter
        for verifier, served in self.bindings.of_verifier.items():
            for drafter in self._movable(verifier, bound_before):
                if len(of_drafter[drafter]) > 1 and any(len(of_drafter[other]) == 1 for other in served - {drafter}):
                    ends = sorted(of_drafter[drafter])
                    before = sum(self._worth(each, self._held[each]) for each in ends)
                    self._unbind(verifier, drafter)
                    if sum(self._worth(each, self._held[each]) for each in ends) < before:
                        self._bind(verifier, drafter)
        free = [each for each in of_drafter if each not in self.bindings.pins]
        while free:
            least, most = min(free, key=self._sharers), max(free, key=self._sharers)
            takeable = of_drafter[most] - of_drafter[least] - self._down.get(least, frozenset())
            may = [verifier for verifier in sorted(takeable) if most in self._movable(verifier, bound_before)]
            if len(of_drafter[most]) - len(of_drafter[least]) < 2 or not may:
                return
            self._unbind(may[-1], most)
            self._bind(may[-1], least)

    # -- what it is worth ----------------------------------------------------------------------------------------------

    def _worth(self, verifier: str, held: float, unskipped: float = UNSKIPPED) -> float:
        load = self._loads[verifier]
        if held <= 0:
            return load.requests / load.bare_s
        draft_s = (self._fixed_s + self._per_request_s * load.requests / max(held, 1.0)) / min(held, 1.0)
        cycle_s = load.drafted_s + draft_s - load.overlap * min(load.drafted_s, draft_s)
        drafted = load.requests * load.length / cycle_s
        return (max(drafted, load.requests / load.plain_s) if load.may_skip else drafted) + unskipped * drafted

    def _need(self, verifier: str) -> tuple[float, float]:
        """Sort key: first the verifier that gains the most per further drafter, over the numbers in `TOGETHER`."""
        held, now = self._held[verifier], self._worth(verifier, self._held[verifier])
        gain = max((self._worth(verifier, held + count) - now) / count for count in TOGETHER)
        return -gain, -self._loads[verifier].requests

    def _takers(self, count: int) -> list[str]:
        """The verifiers that gain the most by `count` more drafters: as many as may be excluded, and one more."""
        worth, held = self._worth, self._held
        gains = {each: worth(each, held[each] + count) - worth(each, held[each]) for each in held}
        return heapq.nlargest(2 + len(self._down), gains, key=gains.__getitem__)

    def _capacity_of(self, drafter: DrafterSpeed, requests: float) -> float:
        if drafter.fixed_s is None or drafter.per_request_s is None:
            return 1.0
        usual, own = self._fixed_s + self._per_request_s * requests, drafter.fixed_s + drafter.per_request_s * requests
        return min(max(usual / max(own, 1e-9), CAPACITY[0]), CAPACITY[1])

    # -- bindings ------------------------------------------------------------------------------------------------------

    def _part(self, verifier: str, drafter: str) -> float:
        """What this drafter counts for at a verifier, relative to a typical drafter of its own."""
        if verifier in self._down.get(drafter, ()):
            return 0.0
        others, loads = self.bindings.of_drafter[drafter] - {verifier}, self._loads
        own = loads[verifier].requests
        return self._capacity[drafter] / (1 + sum(loads[each].requests / (loads[each].requests + own) for each in others))

    def _count(self, verifier: str) -> float:
        return sum(self._part(verifier, drafter) for drafter in self.bindings.of_verifier[verifier])

    def _sharers(self, drafter: str) -> tuple[int, int]:
        serves = self.bindings.of_drafter[drafter]
        return len(serves & self._active), len(serves)

    def _movable(self, verifier: str, bound_before: float) -> list[str]:
        """The verifier's drafters that may be unbound; those bound in this decision may, since it is not in force yet."""
        found = []
        for drafter in sorted(self.bindings.of_verifier[verifier]):
            since = self.bindings.since(verifier, drafter)
            if drafter not in self.bindings.pins and (since is None or since <= bound_before):
                found.append(drafter)
        return found

    def _bind(self, verifier: str, drafter: str) -> None:
        self.bindings.bind(verifier, drafter)
        self._recount(drafter)

    def _unbind(self, verifier: str, drafter: str) -> None:
        self.bindings.unbind(verifier, drafter)
        self._recount(drafter)
        self._held[verifier] = self._count(verifier)

    def _recount(self, drafter: str) -> None:
        for verifier in self.bindings.of_drafter[drafter]:
            self._held[verifier] = self._count(verifier)


def _usual(values: Iterable[float | None], default: float) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else default


class _Load(NamedTuple):
    """A `VerifierLoad` with all values known or assumed."""

    requests: float
    plain_s: float
    drafted_s: float
    length: float
    bare_s: float
    overlap: float
    may_skip: bool


def _completed(loads: Sequence[VerifierLoad]) -> dict[str, _Load]:
    """Fills in what was not measured of a verifier from the others, or else from the constants above."""
    plain_s = _usual((each.plain_s for each in loads), PLAIN_S)
    ratios = (each.drafted_s / each.plain_s if each.drafted_s and each.plain_s else None for each in loads)
    drafted, length = _usual(ratios, DRAFTED), _usual((each.length for each in loads), LENGTH)
    found = {}
    for each in loads:
        plain, requests = each.plain_s or plain_s, max(each.requests, IDLE)
        drafted_s, bare_s = each.drafted_s or plain * drafted, each.bare_s or plain
        found[each.id] = _Load(requests, plain, drafted_s, each.length or length, bare_s, each.overlap, each.may_skip)
    return found
