"""Predicts the tokens per second of a fleet under an assignment.  Pure; `goodput.py` decides by it.

A verifier with n requests and m drafters sends each of them n/m requests a step.  A drafter needs `fixed + per_request * n/m`
for them, and is now and then found busy with another verifier: the expected rest of that work is waited for too (a round of
length t is met with probability t / cycle and is half done on average).  So

    cycle  = verify + delay - overlap * min(verify, delay),      but no shorter than all the work of its busiest drafter
    tokens = sum over its drafters of n/m * (1 + (acceptance length - 1) * quality)
    goodput = tokens / cycle,                                    or n / plain step where drafting may be skipped

and n / bare without drafters: plain steps, or what prompt lookups make of them where that is better.  `delay` is that of the
slowest of its drafters.  What was not measured yet is taken to be as it is elsewhere in the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from backend.coordinator.assignment import Action, DrafterSpeed, Situation, VerifierLoad, actions_between

Array = np.ndarray[Any, np.dtype[Any]]

IDLE_REQUESTS = 0.25
"""A verifier without work counts as so many requests: its first one is to find a drafter."""
PRIOR_PLAIN_S, PRIOR_EXTRA, PRIOR_LENGTH = 0.03, 1.2, 2.5
PRIOR_FIXED_S, PRIOR_PER_REQUEST_S = 0.006, 0.0005
"""Before anything was measured anywhere.  Only their proportions matter, and only until the first requests were served."""
UNFLOORED = 0.01
"""Where drafting is not worth it, more of it still counts for so much: it breaks ties, and leads off plateaus."""
TOGETHER = 2, 4, 8, 16
"""One drafter more may be worth nothing where so many more are worth much: they may come together."""
HEAVIEST = 2.0
"""A straggler's tokens count for so much more at most, and a fast verifier's for so much less."""

Edge = tuple[int, int]
"""(verifier, drafter) by their places in the situation."""


class FleetModel:
    """An assignment that can be changed, and what it is worth.  Everything is by place, for speed."""

    def __init__(self, situation: Situation, straggler_weight: float) -> None:
        self._situation = situation
        self._verifiers = {each.id: i for i, each in enumerate(situation.verifiers)}
        self._drafters = {each.id: i for i, each in enumerate(situation.drafters)}
        self.pinned = {self._drafters[each] for each in situation.pins if each in self._drafters}
        self._read_verifiers(situation.verifiers, straggler_weight)
        self._read_drafters(situation.drafters)
        # Lists, as nearly all are of one or two: thousands of sets would take longer to make than all the rest.
        self.of_verifier: list[list[int]] = [[] for _ in self._verifiers]
        self.of_drafter: list[list[int]] = [[] for _ in self._drafters]
        self._stayed = 0
        """Pairs that were there before and may stay."""
        self.is_changed = False
        self._edges: tuple[Array, Array] | None = None
        self._read_bindings()
        self.work: list[float] = []
        """Per drafter: seconds of drafting in a cycle of its verifiers."""
        self._rest: list[float] = []
        self.arrays = Arrays(self)
        self._sum_up()

    def since(self, edge: Edge) -> float | None:
        """Since when a pair was there before this decision; None: it was not."""
        return self._situation.bindings.get((self._situation.verifiers[edge[0]].id, self._situation.drafters[edge[1]].id))

    def is_settled(self, edge: Edge) -> bool:
        """Whether a pair is to stay as it is."""
        if not self._situation.settled and not self._situation.frozen:
            return False
        verifier, drafter = self._situation.verifiers[edge[0]].id, self._situation.drafters[edge[1]].id
        return verifier in self._situation.frozen or (verifier, drafter) in self._situation.settled

    # What it is worth.

    def goodput(self, v: int) -> tuple[float, float]:
        """Predicted tokens per second of a verifier with its drafters and without any, by the assignment as it is now."""
        n, served = self._requests[v], self.of_verifier[v]
        if not served:
            bare = n / self._bare_s[v]
            return bare, bare
        plain = n / self._plain_s[v]
        share, verify_s = n / len(served), self._drafted_s[v]
        tokens = delay = longest = 0.0
        for d in served:
            if self._down and (v, d) in self._down:
                tokens += share
                continue
            draft_s = self._fixed_s[d] + self._per_request_s[d] * share
            own = 0.5 * self._active[v] * draft_s * draft_s / (verify_s + draft_s)
            delay = max(delay, draft_s + self._rest[d] - own)
            longest = max(longest, self.work[d])
            tokens += share * (1 + (self._length[v] - 1) * self._quality[d])
        return tokens / max(verify_s + delay - self._overlap[v] * min(verify_s, delay), longest), plain

    def best(self, v: int) -> float:
        """Its goodput, without drafts where that is better and it may choose."""
        drafted, plain = self.goodput(v)
        return max(drafted, plain) if self._may_skip[v] else drafted

    def value(self, v: int) -> float:
        """What a verifier's goodput is worth to the search."""
        drafted, plain = self.goodput(v)
        return (max(drafted, plain) if self._may_skip[v] else drafted) + UNFLOORED * drafted

    def weighted(self, v: int) -> float:
        """`value` times the verifier's priority."""
        return self.weight[v] * self.value(v)

    def total(self) -> float:
        """Predicted tokens per second of the fleet."""
        known = self.arrays
        n = known.requests
        v, d = self.edges()
        result: Array = n / known.bare_s
        if not len(v):
            return float(result.sum())
        held = np.bincount(v, minlength=len(n))
        first = np.flatnonzero(np.diff(v, prepend=-1))
        at, share, verify_s = v[first], n[v] / held[v], known.drafted_s[v]
        waited = np.array([edge not in self._down for edge in zip(v.tolist(), d.tolist(), strict=True)]) if self._down else 1
        draft_s = known.fixed_s[d] + known.per_request_s[d] * share
        own = 0.5 * known.active[v] * draft_s * draft_s / (verify_s + draft_s)
        delay = np.maximum.reduceat(waited * (draft_s + np.array(self._rest)[d] - own), first)
        longest = np.maximum.reduceat(waited * np.array(self.work)[d], first)
        gained = waited * known.extra[v] * known.quality[d]
        tokens = np.add.reduceat(share * (1 + gained), first)
        verify_s = verify_s[first]
        drafted = tokens / np.maximum(verify_s + delay - known.overlap[at] * np.minimum(verify_s, delay), longest)
        result[at] = np.where(known.may_skip[at], np.maximum(drafted, n[at] / known.plain_s[at]), drafted)
        return float(result.sum())

    def requests(self, v: int) -> float:
        """Requests of a verifier; never nothing."""
        return self._requests[v]

    def slowness(self, d: int) -> float:
        """Time of a round of average size over the drafter's quality; less is better."""
        return (self._fixed_s[d] + self._per_request_s[d] * self._mean_share) / max(self._quality[d], 0.01)

    def gain(self, remove: Sequence[Edge], add: Sequence[Edge]) -> tuple[float, float]:
        """What a change would add to the weighted sum, and what those whom it affects are worth now.

        The assignment is as before when this returns.
        """
        ends = {v for v, _ in (*remove, *add)}
        touched = {d for v in ends for d in self.of_verifier[v]} | {d for _, d in add}
        affected = ends.union(*(self.of_drafter[d] for d in touched))
        before = sum(self.weighted(v) for v in affected)
        kept = [(d, self.work[d], self._rest[d]) for d in touched]
        self._change(remove, add)
        self._refresh(touched)
        after = sum(self.weighted(v) for v in affected)
        self._change(add, remove)
        for d, work, rest in kept:
            self.work[d], self._rest[d] = work, rest
        return after - before, before

    def apply(self, remove: Sequence[Edge], add: Sequence[Edge]) -> None:
        """Makes a change."""
        ends = {v for v, _ in (*remove, *add)}
        touched = {d for v in ends for d in self.of_verifier[v]} | {d for _, d in add}
        self._change(remove, add)
        self._refresh(touched)
        self.is_changed, self._edges = True, None

    def actions(self) -> list[Action]:
        """What leads from the situation to the assignment as it is now."""
        verifiers, drafters = self._situation.verifiers, self._situation.drafters
        if not self.is_changed and self._stayed == len(self._situation.bindings):
            return []
        after = {(verifiers[v].id, drafters[d].id) for v, served in enumerate(self.of_verifier) for d in served}
        return actions_between(self._situation.bindings, after)

    # Where it is worth looking, for all at once.

    def edges(self) -> tuple[Array, Array]:
        """All pairs, by verifier: places of the verifiers, places of the drafters."""
        if self._edges is None:
            held = [len(served) for served in self.of_verifier]
            v = np.repeat(np.arange(len(held)), held)
            d = np.fromiter(chain.from_iterable(self.of_verifier), dtype=np.int64, count=len(v))
            self._edges = v, d
        return self._edges

    def by_count(self, most: int) -> Array:
        """What each verifier would be worth with 0, 1, ... `most` average drafters beyond its own, weighted and unshared."""
        known = self.arrays
        n, verify_s = known.requests[:, None], known.drafted_s[:, None]
        held = np.array([len(served) for served in self.of_verifier])[:, None] + np.arange(most + 1)
        draft_s = float(known.fixed_s.mean()) + float(known.per_request_s.mean()) * n / np.maximum(held, 1)
        cycle = verify_s + draft_s - known.overlap[:, None] * np.minimum(verify_s, draft_s)
        bare = n / known.bare_s[:, None]
        drafted = np.where(held > 0, n * (1 + known.extra[:, None] * float(known.quality.mean())) / cycle, bare)
        best = np.where(known.may_skip[:, None] & (held > 0), np.maximum(drafted, n / known.plain_s[:, None]), drafted)
        result: Array = np.array(self.weight)[:, None] * (best + UNFLOORED * drafted)
        return result

    def gains_and_losses(self, v: Array, d: Array) -> tuple[Array, Array, Array]:
        """Roughly what more drafters are worth to each verifier, the loss of each pair to its verifier, and what each has.

        Weighted, and as if drafters were not shared and the others like the average; `gain` is exact.
        """
        known = self.arrays
        n, verify_s, plain_s, extra, overlap = known.requests, known.drafted_s, known.plain_s, known.extra, known.overlap
        bare_s = known.bare_s
        fixed_s, per_request_s, quality = known.fixed_s, known.per_request_s, known.quality
        weight, floor = np.array(self.weight), np.where(known.may_skip, n / plain_s, 0.0)
        held = np.bincount(v, minlength=len(n)).astype(float)
        of_held = np.bincount(v, weights=quality[d], minlength=len(n))
        average = float(fixed_s.mean()), float(per_request_s.mean()), float(quality.mean())

        def goodput(at: Array, drafters: Array, fixed: Array | float, per: Array | float, mean: Array) -> Array:
            delay = fixed + per * n[at] / np.maximum(drafters, 1)
            cycle = verify_s[at] + delay - overlap[at] * np.minimum(verify_s[at], delay)
            drafted = np.where(drafters > 0, n[at] * (1 + extra[at] * mean) / cycle, n[at] / bare_s[at])
            result: Array = np.where(drafters > 0, np.maximum(drafted, floor[at]), drafted) + UNFLOORED * drafted
            return result

        every = np.arange(len(n))
        now = goodput(every, held, average[0], average[1], of_held / np.maximum(held, 1))
        gains = np.full(len(n), -np.inf)
        for count in (1, *TOGETHER):
            more = goodput(every, held + count, average[0], average[1], (of_held + count * average[2]) / (held + count))
            gains = np.maximum(gains, more - now)
        with_it = goodput(v, held[v], fixed_s[d], per_request_s[d], of_held[v] / held[v])
        others = (of_held[v] - quality[d]) / np.maximum(held[v] - 1, 1)
        without = goodput(v, held[v] - 1, average[0], average[1], others)
        return weight * gains, weight[v] * (with_it - without), weight * now

    # Details.

    def _read_verifiers(self, loads: Sequence[VerifierLoad], straggler_weight: float) -> None:
        plain = _known((each.plain_s for each in loads), PRIOR_PLAIN_S)
        extra = _mean(
            [each.drafted_s / each.plain_s for each in loads if each.drafted_s is not None and each.plain_s], PRIOR_EXTRA
        )
        self._requests = [max(each.requests, IDLE_REQUESTS) for each in loads]
        self._mean_share = _mean(self._requests, 1.0)
        self._active = [min(each.requests, 1.0) for each in loads]
        self._plain_s = plain
        self._bare_s = [each.bare_s or s for each, s in zip(loads, plain, strict=True)]
        self._drafted_s = [each.drafted_s or extra * s for each, s in zip(loads, plain, strict=True)]
        self._length = _known((each.length for each in loads), PRIOR_LENGTH)
        self._overlap = [each.overlap for each in loads]
        self._may_skip = [each.may_skip for each in loads]
        tgs = [each.tgs if each.tgs and each.requests >= 0.5 else None for each in loads]
        mean = _mean([each for each in tgs if each is not None], 1.0)
        self.weight = [
            1.0 if each is None else min(max((mean / each) ** straggler_weight, 1 / HEAVIEST), HEAVIEST) for each in tgs
        ]

    def _read_drafters(self, speeds: Sequence[DrafterSpeed]) -> None:
        self._fixed_s = _known((each.fixed_s for each in speeds), PRIOR_FIXED_S)
        self._per_request_s = _known((each.per_request_s for each in speeds), PRIOR_PER_REQUEST_S)
        self._quality = [each.quality for each in speeds]
        self._down = {
            (self._verifiers[verifier], d)
            for d, each in enumerate(speeds)
            for verifier in each.down_for
            if verifier in self._verifiers
        }

    def _read_bindings(self) -> None:
        pins = self._situation.pins
        for verifier, drafter in self._situation.bindings:
            v, d = self._verifiers.get(verifier), self._drafters.get(drafter)
            if v is not None and d is not None and (d not in self.pinned or verifier in pins[drafter]):
                self.of_verifier[v].append(d)
                self.of_drafter[d].append(v)
                self._stayed += 1
        for d in self.pinned:
            for verifier in pins[self._situation.drafters[d].id]:
                v = self._verifiers.get(verifier)
                if v is not None and d not in self.of_verifier[v]:
                    self._change((), ((v, d),))
                    self.is_changed = True

    def _change(self, remove: Sequence[Edge], add: Sequence[Edge]) -> None:
        for v, d in remove:
            self.of_verifier[v].remove(d)
            self.of_drafter[d].remove(v)
        for v, d in add:
            self.of_verifier[v].append(d)
            self.of_drafter[d].append(v)

    def _refresh(self, drafters: Iterable[int]) -> None:
        for d in drafters:
            work = rest = 0.0
            for v in self.of_drafter[d]:
                if self._down and (v, d) in self._down:
                    continue
                draft_s = self._fixed_s[d] + self._per_request_s[d] * self._requests[v] / len(self.of_verifier[v])
                work += self._active[v] * draft_s
                rest += 0.5 * self._active[v] * draft_s * draft_s / (self._drafted_s[v] + draft_s)
            self.work[d], self._rest[d] = work, rest

    def _sum_up(self) -> None:
        """`_refresh` of all drafters at once."""
        if self._down:
            self.work, self._rest = [0.0] * len(self.of_drafter), [0.0] * len(self.of_drafter)
            self._refresh(range(len(self.of_drafter)))
            return
        v, d = self.edges()
        known = self.arrays
        held = np.bincount(v, minlength=len(self.of_verifier))
        draft_s = known.fixed_s[d] + known.per_request_s[d] * known.requests[v] / held[v]
        active, verify_s = known.active[v], known.drafted_s[v]
        count = len(self.of_drafter)
        self.work = np.bincount(d, weights=active * draft_s, minlength=count).tolist()
        rest = 0.5 * active * draft_s * draft_s / (verify_s + draft_s)
        self._rest = np.bincount(d, weights=rest, minlength=count).tolist()


class Arrays:
    """What a model has read, for computing with all of it at once."""

    def __init__(self, model: FleetModel) -> None:
        self.requests = np.array(model._requests)
        self.active = np.array(model._active)
        self.plain_s = np.array(model._plain_s)
        self.bare_s = np.array(model._bare_s)
        self.drafted_s = np.array(model._drafted_s)
        self.extra = np.array(model._length) - 1
        self.overlap = np.array(model._overlap)
        self.may_skip = np.array(model._may_skip)
        self.fixed_s = np.array(model._fixed_s)
        self.per_request_s = np.array(model._per_request_s)
        self.quality = np.array(model._quality)


def _known(values: Iterable[float | None], prior: float) -> list[float]:
    """Each value where it is known, else the mean of those that are, else the prior."""
    given = list(values)
    mean = _mean([each for each in given if each is not None], prior)
    return [mean if each is None else each for each in given]


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
