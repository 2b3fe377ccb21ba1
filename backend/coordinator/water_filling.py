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

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from backend.coordinator.assignment import Pair, Situation, VerifierLoad
from backend.fleet.speed import Speed

PLAIN_S, DRAFTED, LENGTH, FIXED_S, PER_REQUEST_S = 0.03, 1.2, 2.0, 5e-3, 5e-4
"""Before any measurement: plain step, drafted step relative to it, acceptance length, a round's fixed time and per request."""
IDLE, ACTIVE = 0.1, 0.5
"""An idle verifier counts as having 0.1 requests; from 0.5 on it counts as active."""
CAPACITY = 0.1, 4.0
"""Least and most that a drafter counts for, relative to a typical one."""
TOGETHER = 1, 2, 4, 8, 16
"""Numbers of further drafters that are tried: one more may be worth nothing where several are worth much."""
MOVES = 8
"""Most moves in one decision."""


def decide(situation: Situation, min_gain: float = 0.05, min_dwell_s: float = 5.0) -> set[Pair]:
    """The pairs to be bound from now on.  Only fit members are part of one, and pins are kept."""
    fleet = Assigning(situation)
    if situation.verifiers and situation.drafters:
        bound_before = situation.now - min_dwell_s
        fleet.place()
        for _ in range(MOVES):
            if not fleet.move(min_gain, bound_before):
                break
        fleet.share(min_gain)
        fleet.stop_needless_sharing(bound_before)
    return {(verifier, drafter) for verifier, served in fleet.of_verifier.items() for drafter in served}


class Assigning:
    """One decision: the assignment so far, and what it is worth.  It begins with the present pairs and the pinned ones."""

    def __init__(self, situation: Situation) -> None:
        self._since, self._pins = situation.bindings, situation.pins
        self._loads = _completed(situation.verifiers)
        self._active = {name for name, load in situation.verifiers.items() if load.requests >= ACTIVE}
        known = [speed for speed in situation.drafters.values() if speed is not None]
        self._usual = Speed(
            _median((speed.fixed_s for speed in known), FIXED_S),
            _median((speed.per_request_s for speed in known), PER_REQUEST_S),
        )
        requests = sum(load.requests for load in situation.verifiers.values()) / max(len(situation.drafters), 1)
        self._capacity = {name: self._capacity_of(speed, requests) for name, speed in situation.drafters.items()}
        self.of_verifier: dict[str, set[str]] = {name: set() for name in situation.verifiers}
        self.of_drafter: dict[str, set[str]] = {name: set() for name in situation.drafters}
        bound = {pair for pair in situation.bindings if pair[1] not in situation.pins}
        pinned = {(verifier, drafter) for drafter, wanted in situation.pins.items() for verifier in wanted}
        for verifier, drafter in bound | pinned:
            if verifier in self.of_verifier and drafter in self.of_drafter:
                self.of_verifier[verifier].add(drafter)
                self.of_drafter[drafter].add(verifier)
        self._held = {name: self._count(name) for name in situation.verifiers}

    # -- the steps -----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Binds the free drafters, fastest first."""
        free = [each for each, serves in self.of_drafter.items() if not serves and each not in self._pins]
        needs = {verifier: self._need(verifier) for verifier in self._held}
        for drafter in sorted(free, key=lambda each: -self._capacity[each]):
            able = [verifier for verifier in needs if drafter not in self._loads[verifier].down]
            verifier = min(able or needs, key=needs.__getitem__)
            self._bind(verifier, drafter)
            needs[verifier] = self._need(verifier)

    def move(self, min_gain: float, bound_before: float) -> bool:
        """Makes the best move, of one drafter or of all drafters of a verifier.  False if no move pays."""
        offers = [(giver, leaving) for giver in self._held for leaving in self._leaving(giver, bound_before)]
        worth = {each: self._worth(each, held) for each, held in self._held.items()}
        takers = {count: self._takers(count, worth) for count in TOGETHER}
        best: tuple[str, str, list[str]] | None = None
        best_gain = 0.0
        for giver, leaving in offers:
            count = max(each for each in TOGETHER if each <= len(leaving))
            able = (each for each in takers[count] if each != giver and self._loads[each].down.isdisjoint(leaving))
            if (taker := next(able, None)) is not None:
                gain, now = self._gain(giver, taker, leaving)
                if gain > max(min_gain * now, best_gain):
                    best, best_gain = (giver, taker, leaving), gain
        if best is None:
            return False
        giver, taker, leaving = best
        for drafter in leaving:
            self._unbind(giver, drafter)
            self._bind(taker, drafter)
        return True

    def _leaving(self, giver: str, bound_before: float) -> list[list[str]]:
        """What `giver` may give away: its slowest movable drafter, and all of them.  Shared drafters do not count."""
        may = [each for each in self._movable(giver, bound_before) if len(self.of_drafter[each]) == 1]
        down = self._loads[giver].down
        slowest = sorted(may, key=lambda each: (each not in down, self._capacity[each]))[:1]
        return [slowest, may] if len(may) > 1 else [may] if may else []

    def _gain(self, giver: str, taker: str, leaving: list[str]) -> tuple[float, float]:
        """The gain of a move, and the present speed of both verifiers.  A giver of its last drafter will share the taker's."""
        giver_held, taker_held = self._held[giver], self._held[taker] + sum(self._capacity[each] for each in leaving)
        now = self._worth(giver, giver_held) + self._worth(taker, self._held[taker])
        less = giver_held - sum(self._part(giver, each) for each in leaving)
        if len(leaving) == len(self.of_verifier[giver]):
            busy = self._loads[taker].requests / (self._loads[taker].requests + self._loads[giver].requests)
            less = 1 / (1 + busy) if self._worth(giver, 1 / (1 + busy)) > self._worth(giver, 0.0) else 0.0
            taker_held -= 1 - 1 / (2 - busy) if less else 0.0
        return self._worth(giver, less) + self._worth(taker, taker_held) - now, now

    def share(self, most_lost: float) -> None:
        """Has verifiers without a drafter share one, those with the most requests first."""
        sharers = {each: self._sharers(each) for each in self.of_drafter if each not in self._pins}
        bare = [each for each, served in self.of_verifier.items() if not served]
        for verifier in sorted(bare, key=lambda each: -self._loads[each].requests):
            able = [each for each in sharers if each not in self._loads[verifier].down]
            if not able:
                continue
            drafter = min(able, key=sharers.__getitem__)
            ends = [*self.of_drafter[drafter], verifier]
            before = self._total(ends)
            self._bind(verifier, drafter)
            gained = self._worth(verifier, self._held[verifier]) > self._worth(verifier, 0.0)
            if verifier in self._active and not (gained and self._total(ends) >= (1 - most_lost) * before):
                self._unbind(verifier, drafter)
            sharers[drafter] = self._sharers(drafter)

    def stop_needless_sharing(self, bound_before: float) -> None:
        """Has verifiers with a drafter of their own leave shared ones, unless that costs speed.  Then evens out sharing."""
        of_drafter = self.of_drafter
        for verifier, served in self.of_verifier.items():
            for drafter in self._movable(verifier, bound_before):
                if len(of_drafter[drafter]) > 1 and any(len(of_drafter[other]) == 1 for other in served - {drafter}):
                    ends = sorted(of_drafter[drafter])
                    before = self._total(ends)
                    self._unbind(verifier, drafter)
                    if self._total(ends) < before:
                        self._bind(verifier, drafter)
        free = [each for each in of_drafter if each not in self._pins]
        while free and self._even_out(free, bound_before):
            pass

    def _even_out(self, drafters: Sequence[str], bound_before: float) -> bool:
        """Moves one verifier from the drafter with the most to that with the fewest, if they differ by 2; says whether it did.

        The numbers of busy verifiers are evened out first, then those of all, by idle ones.
        """
        active, of_drafter = self._active, self.of_drafter
        for movers, counted in ((active, active), (self._loads.keys() - active, self._loads.keys())):
            numbers = {each: len(of_drafter[each] & counted) for each in drafters}
            least, most = min(drafters, key=numbers.__getitem__), max(drafters, key=numbers.__getitem__)
            may = [
                verifier
                for verifier in sorted((of_drafter[most] - of_drafter[least]) & movers)
                if least not in self._loads[verifier].down and most in self._movable(verifier, bound_before)
            ]
            if may and numbers[most] - numbers[least] > 1:
                self._unbind(may[-1], most)
                self._bind(may[-1], least)
                return True
        return False

    # -- what it is worth ----------------------------------------------------------------------------------------------

    def _worth(self, verifier: str, held: float) -> float:
        load = self._loads[verifier]
        if held <= 0:
            return load.requests / load.bare_s
        draft_s = self._usual.step_s(load.requests / max(held, 1.0)) / min(held, 1.0)
        cycle_s = load.drafted_s + draft_s - load.overlap * min(load.drafted_s, draft_s)
        drafted = load.requests * load.length / cycle_s
        return max(drafted, load.requests / load.plain_s) if load.may_skip else drafted

    def _total(self, verifiers: Iterable[str]) -> float:
        return sum(self._worth(each, self._held[each]) for each in verifiers)

    def _need(self, verifier: str) -> tuple[float, int, float]:
        """Sort key: first the verifier that gains the most per further drafter, over the numbers in `TOGETHER`.

        Among equals (drafts may not pay at all), the one with the fewest drafters comes first, then the busiest.
        """
        held, now = self._held[verifier], self._worth(verifier, self._held[verifier])
        gain = max((self._worth(verifier, held + count) - now) / count for count in TOGETHER)
        return -gain, len(self.of_verifier[verifier]), -self._loads[verifier].requests

    def _takers(self, count: int, worth: Mapping[str, float]) -> list[str]:
        """All verifiers, those first that gain the most by `count` more drafters; `worth` is what they make now."""
        gains = {each: self._worth(each, held + count) - worth[each] for each, held in self._held.items()}
        return sorted(gains, key=gains.__getitem__, reverse=True)

    def _capacity_of(self, speed: Speed | None, requests: float) -> float:
        if speed is None:
            return 1.0
        relative = self._usual.step_s(requests) / max(speed.step_s(requests), 1e-9)
        return min(max(relative, CAPACITY[0]), CAPACITY[1])

    # -- bindings ------------------------------------------------------------------------------------------------------

    def _part(self, verifier: str, drafter: str) -> float:
        """What this drafter counts for at a verifier, relative to a typical drafter of its own."""
        if drafter in self._loads[verifier].down:
            return 0.0
        others, loads = self.of_drafter[drafter] - {verifier}, self._loads
        own = loads[verifier].requests
        return self._capacity[drafter] / (1 + sum(loads[each].requests / (loads[each].requests + own) for each in others))

    def _count(self, verifier: str) -> float:
        return sum(self._part(verifier, drafter) for drafter in self.of_verifier[verifier])

    def _sharers(self, drafter: str) -> tuple[int, int]:
        serves = self.of_drafter[drafter]
        return len(serves & self._active), len(serves)

    def _movable(self, verifier: str, bound_before: float) -> list[str]:
        """The verifier's drafters that may be unbound; those bound in this decision may, since it is not in force yet."""
        free = [each for each in sorted(self.of_verifier[verifier]) if each not in self._pins]
        return [each for each in free if self._since.get((verifier, each), -math.inf) <= bound_before]

    def _bind(self, verifier: str, drafter: str) -> None:
        self.of_verifier[verifier].add(drafter)
        self.of_drafter[drafter].add(verifier)
        self._recount(self.of_drafter[drafter])

    def _unbind(self, verifier: str, drafter: str) -> None:
        self.of_verifier[verifier].discard(drafter)
        self.of_drafter[drafter].discard(verifier)
        self._recount({*self.of_drafter[drafter], verifier})

    def _recount(self, verifiers: Iterable[str]) -> None:
        for verifier in verifiers:
            self._held[verifier] = self._count(verifier)


def _median(values: Iterable[float], default: float) -> float:
    known = list(values)
    return statistics.median(known) if known else default


def _completed(loads: Mapping[str, VerifierLoad]) -> dict[str, VerifierLoad]:
    """Fills in what was not measured of a verifier from the others, or else from the constants above."""
    known = loads.values()
    plain_s = _median((each.plain_s for each in known if each.plain_s), PLAIN_S)
    drafted = _median((each.drafted_s / each.plain_s for each in known if each.drafted_s and each.plain_s), DRAFTED)
    length = _median((each.length for each in known if each.length), LENGTH)
    found = {}
    for name, each in loads.items():
        plain = each.plain_s or plain_s
        found[name] = replace(
            each,
            requests=max(each.requests, IDLE),
            plain_s=plain,
            drafted_s=each.drafted_s or plain * drafted,
            length=each.length or length,
            bare_s=each.bare_s or plain,
        )
    return found
