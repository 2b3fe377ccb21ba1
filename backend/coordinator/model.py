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
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from backend.coordinator.assignment import Action, Situation, actions_between
from backend.coordinator.table import Array, Arrays, Lists, Table

UNFLOORED = 0.01
"""Where drafting is not worth it, more of it still counts for so much: it breaks ties, and leads off plateaus."""
TOGETHER = 2, 4, 8, 16
"""One drafter more may be worth nothing where so many more are worth much: they may come together."""
Edge = tuple[int, int]
"""(verifier, drafter) by their places in the situation."""


@dataclass
class Pairing:
    """An assignment as lists by place, and what it makes of the drafters."""

    of_verifier: list[list[int]]
    of_drafter: list[list[int]]
    work: list[float]
    rest: list[float]


@dataclass
class Outlook:
    """Roughly what changes of each verifier's pairs would do to it."""

    now: Array
    """What each verifier is worth."""
    gains: dict[int, Array]
    """By number of further drafters."""
    exchanged: Array
    """Gain of an average drafter in place of the slowest one."""
    losses: Array
    """By pair: what its verifier would lose with it."""

    @property
    def most(self) -> Array:
        """The greatest of the gains."""
        result: Array = np.max([*self.gains.values()], axis=0)
        return result


class FleetModel:
    """An assignment that can be changed, and what it is worth.

    Arrays serve where all members are looked at, lists where one is.  The lists are made when they are first needed: in a large
    fleet most decisions need none, and thousands of small objects would take longer to make than all the rest.
    """

    def __init__(self, situation: Situation, straggler_weight: float) -> None:
        self._situation = situation
        self._table = Table.of(situation)
        self.arrays = Arrays(self._table, straggler_weight)
        self.counts = len(situation.verifiers), len(situation.drafters)
        """Verifiers and drafters."""
        self._down = {
            (self._table.place_of_verifier[verifier], d)
            for d, down_for in self._table.down.items()
            for verifier in down_for
            if verifier in self._table.place_of_verifier
        }
        self.is_changed = False
        places = self._table.place_of_drafter
        self.pinned = {places[each] for each in situation.pins if each in places}
        self._edges: tuple[Array, Array] | None = self._table.pairs()
        self._burdens: tuple[Array, Array] | None = None
        self._stayed = len(self._edges[0])
        """Pairs that were there before and may stay."""
        if self.pinned:
            self._obey_pins(*self._edges)

    @cached_property
    def one(self) -> Lists:
        """What is known of each member."""
        return Lists(self.arrays)

    @cached_property
    def _pairing(self) -> Pairing:
        (v, d), (work, rest) = self.edges(), self.burdens()
        return Pairing(_grouped(v, d, self.counts[0]), _grouped(d, v, self.counts[1]), work.tolist(), rest.tolist())

    @property
    def of_verifier(self) -> list[list[int]]:
        """Drafters of each verifier."""
        return self._pairing.of_verifier

    @property
    def of_drafter(self) -> list[list[int]]:
        """Verifiers of each drafter."""
        return self._pairing.of_drafter

    @property
    def work(self) -> list[float]:
        """Per drafter: seconds of drafting in a cycle of its verifiers."""
        return self._pairing.work

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
        one, work, rest = self.one, self._pairing.work, self._pairing.rest
        n, served = one.requests[v], self._pairing.of_verifier[v]
        if not served:
            bare = n / one.bare_s[v]
            return bare, bare
        plain = n / one.plain_s[v]
        share, verify_s, active, extra = n / len(served), one.drafted_s[v], one.active[v], one.extra[v]
        tokens = delay = longest = 0.0
        for d in served:
            if self._down and (v, d) in self._down:
                tokens += share
                continue
            draft_s = one.fixed_s[d] + one.per_request_s[d] * share
            own = 0.5 * active * draft_s * draft_s / (verify_s + draft_s)
            delay = max(delay, draft_s + rest[d] - own)
            longest = max(longest, work[d])
            tokens += share * (1 + extra * one.quality[d])
        return tokens / max(verify_s + delay - one.overlap[v] * min(verify_s, delay), longest), plain

    def best(self, v: int) -> float:
        """Its goodput, without drafts where that is better and it may choose."""
        drafted, plain = self.goodput(v)
        return max(drafted, plain) if self.one.may_skip[v] else drafted

    def value(self, v: int) -> float:
        """What a verifier's goodput is worth to the search."""
        drafted, plain = self.goodput(v)
        return (max(drafted, plain) if self.one.may_skip[v] else drafted) + UNFLOORED * drafted

    def weighted(self, v: int) -> float:
        """`value` times the verifier's priority."""
        return self.one.weight[v] * self.value(v)

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
        waited, (work, rest) = self._waited(v, d), self.burdens()
        draft_s = known.fixed_s[d] + known.per_request_s[d] * share
        own = 0.5 * known.active[v] * draft_s * draft_s / (verify_s + draft_s)
        delay = np.maximum.reduceat(waited * (draft_s + rest[d] - own), first)
        longest = np.maximum.reduceat(waited * work[d], first)
        gained = waited * known.extra[v] * known.quality[d]
        tokens = np.add.reduceat(share * (1 + gained), first)
        verify_s = verify_s[first]
        drafted = tokens / np.maximum(verify_s + delay - known.overlap[at] * np.minimum(verify_s, delay), longest)
        result[at] = np.where(known.may_skip[at], np.maximum(drafted, n[at] / known.plain_s[at]), drafted)
        return float(result.sum())

    def requests(self, v: int) -> float:
        """Requests of a verifier; never nothing."""
        return self.one.requests[v]

    def slowness(self, d: int) -> float:
        """Time of a round of average size over the drafter's quality; less is better."""
        return self.one.slowness[d]

    def gain(self, remove: Sequence[Edge], add: Sequence[Edge]) -> tuple[float, float]:
        """What a change would add to the weighted sum, and what those whom it affects are worth now.

        The assignment is as before when this returns.
        """
        ends = {v for v, _ in (*remove, *add)}
        touched = {d for v in ends for d in self.of_verifier[v]} | {d for _, d in add}
        affected = ends.union(*(self.of_drafter[d] for d in touched))
        before = sum(self.weighted(v) for v in affected)
        all_work, all_rest = self._pairing.work, self._pairing.rest
        kept = [(d, all_work[d], all_rest[d]) for d in touched]
        self._change(remove, add)
        self._refresh(touched)
        after = sum(self.weighted(v) for v in affected)
        self._change(add, remove)
        for d, work, rest in kept:
            all_work[d], all_rest[d] = work, rest
        return after - before, before

    def apply(self, remove: Sequence[Edge], add: Sequence[Edge]) -> None:
        """Makes a change."""
        ends = {v for v, _ in (*remove, *add)}
        touched = {d for v in ends for d in self.of_verifier[v]} | {d for _, d in add}
        self._change(remove, add)
        self._refresh(touched)
        self.is_changed, self._edges, self._burdens = True, None, None

    def actions(self) -> list[Action]:
        """What leads from the situation to the assignment as it is now."""
        if not self.is_changed and self._stayed == len(self._situation.bindings):
            return []
        verifiers, drafters = self._situation.verifiers, self._situation.drafters
        v, d = self.edges()
        after = {(verifiers[a].id, drafters[b].id) for a, b in zip(v.tolist(), d.tolist(), strict=True)}
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

    def burdens(self) -> tuple[Array, Array]:
        """Per drafter: seconds of drafting in a cycle of its verifiers; what is left of a round when another verifier asks."""
        if self._burdens is None:
            if self.is_changed:
                self._burdens = np.array(self._pairing.work), np.array(self._pairing.rest)
            else:
                self._burdens = self._sum_up()
        return self._burdens

    def held(self) -> tuple[Array, Array]:
        """How many drafters each verifier has, and how many verifiers each drafter."""
        v, d = self.edges()
        return np.bincount(v, minlength=self.counts[0]), np.bincount(d, minlength=self.counts[1])

    def by_count(self, most: int) -> Array:
        """What each verifier would be worth with 0, 1, ... `most` average drafters beyond its own, weighted and unshared."""
        known = self.arrays
        n, verify_s = known.requests[:, None], known.drafted_s[:, None]
        held = self.held()[0][:, None] + np.arange(most + 1)
        draft_s = float(known.fixed_s.mean()) + float(known.per_request_s.mean()) * n / np.maximum(held, 1)
        cycle = verify_s + draft_s - known.overlap[:, None] * np.minimum(verify_s, draft_s)
        bare = n / known.bare_s[:, None]
        drafted = np.where(held > 0, n * (1 + known.extra[:, None] * float(known.quality.mean())) / cycle, bare)
        best = np.where(known.may_skip[:, None] & (held > 0), np.maximum(drafted, n / known.plain_s[:, None]), drafted)
        result: Array = known.weight[:, None] * (best + UNFLOORED * drafted)
        return result

    def outlook(self, v: Array, d: Array) -> Outlook:
        """What looking at all pairs at once tells; weighted, and as if drafters were not shared; `gain` is exact."""
        known = self.arrays
        n, bare, overlap = known.requests, known.requests / known.bare_s, known.overlap
        floor = np.where(known.may_skip, known.requests / known.plain_s, 0.0)
        held = np.bincount(v, minlength=len(n)).astype(float)
        of_held = np.bincount(v, weights=known.quality[d], minlength=len(n))
        fixed_s, per_request_s = float(known.fixed_s.mean()), float(known.per_request_s.mean())
        quality = float(known.quality.mean())

        def worth(at: Array, drafters: Array, delay: Array, mean: Array) -> Array:
            verify_s = known.drafted_s[at]
            cycle = verify_s + delay - overlap[at] * np.minimum(verify_s, delay)
            drafted = np.where(drafters > 0, n[at] * (1 + known.extra[at] * mean) / cycle, bare[at])
            best = np.where(drafters > 0, np.maximum(drafted, floor[at]), drafted)
            result: Array = known.weight[at] * (best + UNFLOORED * drafted)
            return result

        def average(drafters: Array, requests: Array) -> Array:
            result: Array = fixed_s + per_request_s * requests / np.maximum(drafters, 1)
            return result

        every, mean = np.arange(len(n)), of_held / np.maximum(held, 1)
        now = worth(every, held, average(held, n), mean)
        more = [
            worth(every, held + count, average(held + count, n), (of_held + count * quality) / (held + count)) - now
            for count in (1, *TOGETHER)
        ]
        draft_s = known.fixed_s[d] + known.per_request_s[d] * n[v] / held[v]
        slowest = np.zeros(len(n))
        first = np.flatnonzero(np.diff(v, prepend=-1))
        slowest[v[first]] = np.maximum.reduceat(draft_s, first)
        faster = np.minimum(slowest, average(held, n))
        exchanged = worth(every, held, faster, mean) - worth(every, held, slowest, mean)
        with_it = worth(v, held[v], draft_s, mean[v])
        others = (of_held[v] - known.quality[d]) / np.maximum(held[v] - 1, 1)
        losses = with_it - worth(v, held[v] - 1, average(held[v] - 1, n[v]), others)
        return Outlook(now, dict(zip((1, *TOGETHER), more, strict=True)), exchanged, losses)

    # Details.

    def _obey_pins(self, v: Array, d: Array) -> None:
        drafters, places = self._situation.drafters, self._table.place_of_verifier
        wanted = {b: {places[each] for each in self._situation.pins[drafters[b].id] if each in places} for b in self.pinned}
        stay = np.array([b not in wanted or a in wanted[b] for a, b in zip(v.tolist(), d.tolist(), strict=True)], dtype=bool)
        self._edges, self._stayed = (v[stay], d[stay]), int(stay.sum())
        missing = [(a, b) for b, ends in wanted.items() for a in ends if a not in self.of_drafter[b]]
        if missing:
            self.apply((), missing)

    def _waited(self, v: Array, d: Array) -> Array:
        """By pair: 0 where the verifier does not wait for the drafter, else 1."""
        if not self._down:
            return np.ones(1)
        return np.array([edge not in self._down for edge in zip(v.tolist(), d.tolist(), strict=True)], dtype=float)

    def _change(self, remove: Sequence[Edge], add: Sequence[Edge]) -> None:
        of_verifier, of_drafter = self._pairing.of_verifier, self._pairing.of_drafter
        for v, d in remove:
            of_verifier[v].remove(d)
            of_drafter[d].remove(v)
        for v, d in add:
            of_verifier[v].append(d)
            of_drafter[d].append(v)

    def _refresh(self, drafters: Iterable[int]) -> None:
        one, pairing = self.one, self._pairing
        for d in drafters:
            work = rest = 0.0
            for v in pairing.of_drafter[d]:
                if self._down and (v, d) in self._down:
                    continue
                draft_s = one.fixed_s[d] + one.per_request_s[d] * one.requests[v] / len(pairing.of_verifier[v])
                work += one.active[v] * draft_s
                rest += 0.5 * one.active[v] * draft_s * draft_s / (one.drafted_s[v] + draft_s)
            pairing.work[d], pairing.rest[d] = work, rest

    def _sum_up(self) -> tuple[Array, Array]:
        """`_refresh` of all drafters at once."""
        (v, d), known, count = self.edges(), self.arrays, self.counts[1]
        held = np.bincount(v, minlength=self.counts[0])
        draft_s = known.fixed_s[d] + known.per_request_s[d] * known.requests[v] / held[v]
        active, verify_s = self._waited(v, d) * known.active[v], known.drafted_s[v]
        rest = 0.5 * active * draft_s * draft_s / (verify_s + draft_s)
        return np.bincount(d, weights=active * draft_s, minlength=count), np.bincount(d, weights=rest, minlength=count)


def _grouped(keys: Array, values: Array, count: int) -> list[list[int]]:
    """The values of each key from 0 to `count` - 1."""
    order = np.argsort(keys, kind="stable")
    ordered: list[int] = values[order].tolist()
    ends: list[int] = np.cumsum(np.bincount(keys, minlength=count)).tolist()
    return [ordered[begin:end] for begin, end in pairwise((0, *ends))]
