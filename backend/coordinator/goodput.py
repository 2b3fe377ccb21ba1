"""Assigns drafters where they bring the most tokens per second.  Pure.

    place     a free drafter goes where one more is worth the most
    share     a verifier without any gets a share of the least busy drafter
    improve   drafters move, are shared, or change places, where the gain is worth a change

A change must promise `min_gain` of what the verifiers it affects have now, and takes nothing away that is younger than
`min_dwell_s`: measurements are noisy, and a new drafter costs each request one opening.  What was placed in this very decision
may still be changed freely, so that the fleet starts well.  Where the fleet is large only the most promising pairs are looked
at exactly; a decision then costs O(verifiers + drafters + pairs), a few milliseconds for thousands.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from backend.coordinator.assignment import Decision, Situation
from backend.coordinator.model import TOGETHER, Edge, FleetModel
from backend.coordinator.table import Array

SMALL = 96
"""With so many possible pairs at most, every change is looked at."""
PROMISING = 4
"""In a larger fleet, so many verifiers, drafters and pairs of each kind are."""
ROUNDS, ROUNDS_AT_START = 4, 48
"""Times that changes are looked for in one decision; the more where something was placed."""
FREE_GAIN = 0.002
"""What a change must promise that undoes nothing but this decision's own placing, or ends a pair that does harm."""
START_GAIN = 0.01
"""What a further pair must promise verifiers all of whose drafters are new."""
LAYOUTS = 4
"""Ways of placing free drafters to begin with: by worth, so that equals are together, in turn, in turn backwards."""
IDLE_BURDEN_S = 1e-4
REFUSALS = 8
"""So many verifiers that gain nothing from the least busy drafter, and the rest is not asked."""
MOST_AT_ONCE = 32
"""Drafters more for one verifier that are looked at when free ones are placed."""


@dataclass(frozen=True)
class Change:
    """One possible step."""

    remove: tuple[Edge, ...] = ()
    add: tuple[Edge, ...] = ()


@dataclass
class _Search:
    """One decision on its way."""

    model: FleetModel
    now: float
    min_gain: float
    min_dwell_s: float
    layout: int | None = None
    """Which way of placing free drafters to begin with; None: the one that looks best."""
    placed: bool = False

    def run(self) -> None:
        """Places, shares, improves."""
        _place(self)
        _share(self)
        _improve(self)

    def worth(self) -> float:
        """What is to be made great."""
        return sum(map(self.model.weighted, range(self.model.counts[0])))

    def may_remove(self, edge: Edge) -> bool:
        """Whether a pair is neither pinned nor too young."""
        since = self.model.since(edge)
        is_old = since is None or self.now - since >= self.min_dwell_s
        return edge[1] not in self.model.pinned and is_old and not self.model.is_settled(edge)

    def may_add(self, edge: Edge) -> bool:
        """Whether a pair is possible and not there yet."""
        is_new = edge[1] not in self.model.of_verifier[edge[0]]
        return edge[1] not in self.model.pinned and is_new and not self.model.is_settled(edge)

    def apply(self, change: Change) -> None:
        """Makes a change."""
        self.model.apply(change.remove, change.add)


@dataclass(frozen=True)
class Goodput:
    """See the module's text."""

    min_gain: float = 0.05
    min_dwell_s: float = 5.0
    straggler_weight: float = 0.25
    """Exponent of (mean TGS / a verifier's TGS): 0 looks at the fleet's tokens per second alone."""

    def decide(self, situation: Situation) -> Decision:
        """Places, shares, improves."""
        search = self._search(situation)
        before = search.model.total()
        if situation.verifiers and situation.drafters:
            search.run()
            if search.placed and not situation.bindings and len(situation.verifiers) * len(situation.drafters) <= SMALL:
                # A fresh start of a small fleet: what is best in the end need not look best before it is improved.
                others = [self._search(situation, layout) for layout in range(LAYOUTS)]
                for other in others:
                    other.run()
                search = max([search, *others], key=_Search.worth)
        model = search.model
        return Decision(model.actions(), before, model.total() if model.is_changed else before)

    def _search(self, situation: Situation, layout: int | None = None) -> _Search:
        model = FleetModel(situation, self.straggler_weight)
        return _Search(model, situation.now, self.min_gain, self.min_dwell_s, layout)


def _place(search: _Search) -> None:
    """Free drafters, the fastest first, go where one more is worth the most.

    One more may be worth nothing where two more are worth much: a verifier's worth over the number of its drafters is replaced
    by its concave envelope, the best that any number of further drafters gives per drafter.
    """
    model = search.model
    free = [d for d in np.flatnonzero(model.held()[1] == 0).tolist() if d not in model.pinned]
    if not free:
        return
    search.placed = True
    free.sort(key=model.slowness)
    slopes = _envelope(model.by_count(min(len(free), MOST_AT_ONCE)))
    order = np.argsort(-slopes, axis=None, kind="stable")[: len(free)]
    # With more drafters than anybody was looked at for, the rest goes round.
    takers = [v for v, _ in zip(cycle((order // slopes.shape[1]).tolist()), free, strict=False)]
    # A verifier waits for the slowest of its drafters.  The fast ones may be best where they are worth the most one by one, or
    # together, so that a slow one keeps none of them waiting.
    first = {v: rank for rank, v in reversed(list(enumerate(takers)))}
    layouts = [list(zip(each, free, strict=True)) for each in (takers, sorted(takers, key=lambda v: first[v]))]
    if search.layout is not None:
        evenly = [
            v for v, _ in zip(cycle(sorted(range(model.counts[0]), key=model.requests, reverse=True)), free, strict=False)
        ]
        layouts.append(list(zip(evenly, free, strict=True)))
        layouts.append(list(zip(evenly, reversed(free), strict=True)))
        model.apply((), layouts[search.layout])
        return
    worth = []
    for layout in layouts:
        model.apply((), layout)
        worth.append(model.total())
        model.apply(layout, ())
    model.apply((), layouts[0] if worth[0] >= worth[1] else layouts[1])


def _envelope(worth: Array) -> Array:
    """Slopes of the least concave functions above each row; they never grow along a row."""
    slopes = np.diff(worth, axis=1)
    for row in slopes:
        runs: list[tuple[float, int]] = []
        for slope in row.tolist():
            total, count = slope, 1
            while runs and runs[-1][0] < total / count * runs[-1][1]:
                more = runs.pop()
                total, count = total + more[0], count + more[1]
            runs.append((total, count))
        row[:] = [total / count for total, count in runs for _ in range(count)]
    return slopes


def _share(search: _Search) -> None:
    """Verifiers without a drafter, those with the most requests first, join the least busy one where that helps.

    Where drafters are too few for all, whoever gains nothing stays alone; not all of many are asked in every decision.
    """
    model = search.model
    bare: list[int] = np.flatnonzero(model.held()[0] == 0).tolist()
    if not bare:
        return
    bare.sort(key=model.requests, reverse=True)
    shared = [(_burden(model, d), d) for d in range(model.counts[1]) if d not in model.pinned]
    heapq.heapify(shared)
    for order in (bare, bare[::-1]):
        refused = 0
        for v in order:
            if not shared or refused >= REFUSALS:
                break
            if model.of_verifier[v]:
                continue
            d = shared[0][1]
            change = Change(add=((v, d),))
            if not search.may_add((v, d)) or _worth(search, change) is None:
                refused += 1
                continue
            search.placed = True
            search.apply(change)
            heapq.heapreplace(shared, (_burden(model, d), d))


def _burden(model: FleetModel, d: int) -> float:
    """A drafter's work; among those that have none, how many verifiers may give it some."""
    return model.work[d] + IDLE_BURDEN_S * len(model.of_drafter[d])


def _improve(search: _Search) -> None:
    """Looks for changes until none is worth it; in one round, those that have nothing to do with each other are all made."""
    for _ in range(ROUNDS_AT_START if search.placed else ROUNDS):
        found = sorted(
            ((gain, change) for change in _candidates(search) if (gain := _worth(search, change)) is not None),
            key=lambda each: -each[0],
        )
        if not found:
            return
        touched: tuple[set[int], set[int]] = set(), set()
        for _, change in found:
            edges = (*change.remove, *change.add)
            ends = {v for v, _ in edges}
            drafters = {d for _, d in edges}.union(*(search.model.of_verifier[v] for v in ends))
            if not ends & touched[0] and not drafters & touched[1]:
                search.apply(change)
                touched[0].update(ends)
                touched[1].update(drafters)


def _worth(search: _Search, change: Change) -> float | None:
    """The gain of a change that pays; None of any other."""
    model = search.model
    gain, affected = model.gain(change.remove, change.add)
    ends = {v for v, _ in (*change.remove, *change.add)}
    if all(model.since((v, d)) is None for v in ends for d in model.of_verifier[v]):
        wanted = (FREE_GAIN if change.remove else START_GAIN) * sum(model.weighted(v) for v in ends)
    elif change.remove and all(model.since(edge) is None for edge in change.remove):
        wanted = FREE_GAIN * sum(model.weighted(v) for v in ends)
    elif not all(model.of_verifier[v] for v in ends) or (not change.add and any(len(model.of_verifier[v]) == 1 for v in ends)):
        # Whether a verifier has any drafter is judged by itself: the smallest has a right to one that does not harm.
        wanted = search.min_gain * sum(model.weighted(v) for v in ends)
    else:
        wanted = (search.min_gain if change.add else FREE_GAIN) * affected
    return gain if gain > wanted else None


def _candidates(search: _Search) -> Iterator[Change]:
    """Changes that keep every drafter used."""
    model = search.model
    if model.counts[0] * model.counts[1] > SMALL:
        yield from _promising(search)
        return
    v, d = model.edges()
    every, takers = list(zip(v.tolist(), d.tolist(), strict=True)), list(range(model.counts[0]))
    pairs, idle = [edge for edge in every if search.may_remove(edge)], np.argsort(model.work, kind="stable").tolist()
    if not every:
        return
    for edge in pairs:
        yield from _changes_of(search, edge, takers, idle)
    for a in takers:
        yield from _additions(search, a, idle)
    yield from _exchanges(search, pairs, pairs)


def _additions(search: _Search, a: int, idle: list[int]) -> Iterator[Change]:
    """Further drafters for one verifier, one by one and several together."""
    new = [(a, other) for other in idle if search.may_add((a, other))]
    yield from (Change(add=(edge,)) for edge in new)
    yield from (Change(add=tuple(new[:count])) for count in TOGETHER if count <= len(new))


def _promising(search: _Search) -> Iterator[Change]:
    """The same for a large fleet, of the most promising verifiers, pairs and drafters.

    Estimates say which; half of what is asked of a change, so that in a steady state little or nothing is left to look at.
    """
    model = search.model
    v, d = model.edges()
    if not len(v):
        return
    outlook, held = model.outlook(v, d), model.held()[1]
    asked = 0.5 * search.min_gain * outlook.now
    more = [a for a in _best(-outlook.most, PROMISING) if outlook.most[a] > asked[a]]
    slow = [a for a in _best(-outlook.exchanged, PROMISING) if outlook.exchanged[a] > asked[a]]
    crowded = np.flatnonzero(held[d] > 1)
    if not more and not slow and not len(crowded):
        return
    work = model.burdens()[0]
    idle = _best(work, max(TOGETHER))
    crowded = crowded[_best(-work[d[crowded]], 2 * PROMISING)]
    spare = _best(outlook.losses, 4 * PROMISING) if more or slow else []
    loss = {(int(v[i]), int(d[i])): float(outlook.losses[i]) for i in (*spare, *crowded)}
    pairs = [edge for edge in loss if search.may_remove(edge)][: 3 * PROMISING]

    def is_likely(a: int, count: int, lost: float, others: set[int]) -> bool:
        enough = asked[a] + sum(asked[other] for other in others)
        return search.placed or bool(outlook.gains[count][a] - lost > enough)

    for edge in pairs:
        is_shared = held[edge[1]] > 1
        takers = [a for a in more if is_shared or is_likely(a, 1, loss[edge], {edge[0]})]
        yield from _changes_of(search, edge, takers, idle[:PROMISING])
    for a in more:
        for change in _additions(search, a, idle):
            if is_likely(a, len(change.add), 0.0, {other for _, b in change.add for other in model.of_drafter[b]}):
                yield change
    slowest = [(a, max(model.of_verifier[a], key=model.slowness)) for a in slow if model.of_verifier[a]]
    yield from _exchanges(search, [edge for edge in slowest if search.may_remove(edge)], pairs)


def _changes_of(search: _Search, edge: Edge, takers: list[int], idle: list[int]) -> Iterator[Change]:
    """What can be done with one pair: its drafter moves, its verifier moves, it ends."""
    model, (v, d) = search.model, edge
    yield from (Change((edge,), ((a, d),)) for a in takers if search.may_add((a, d)))
    if len(model.of_verifier[v]) > 1:
        yield from _moves_of_the_slow(search, edge, takers)
        yield from _moves_of_all(search, edge, takers)
    if len(model.of_drafter[d]) > 1:
        yield from (Change((edge,), ((v, other),)) for other in idle if search.may_add((v, other)))
        yield Change((edge,))


def _moves_of_the_slow(search: _Search, edge: Edge, takers: list[int]) -> Iterator[Change]:
    """A drafter moves with all that are as slow: as long as one stays, its verifier has gained nothing."""
    model, (v, d) = search.model, edge
    limit = model.slowness(d)
    slow = [other for other in model.of_verifier[v] if model.slowness(other) >= limit]
    if 1 < len(slow) < len(model.of_verifier[v]) and all(search.may_remove((v, other)) for other in slow):
        for a in takers:
            if all(search.may_add((a, other)) for other in slow):
                yield Change(tuple((v, other) for other in slow), tuple((a, other) for other in slow))


def _moves_of_all(search: _Search, edge: Edge, takers: list[int]) -> Iterator[Change]:
    """A verifier that does better by prompt lookup gains nothing before the last of its drafters has gone."""
    v, served = edge[0], list(search.model.of_verifier[edge[0]])
    if edge[1] == served[0] and len(served) <= max(TOGETHER) and all(search.may_remove((v, d)) for d in served):
        for a in takers:
            new = [(a, d) for d in served if d not in search.model.of_verifier[a]]
            if a != v and all(search.may_add(each) for each in new):
                yield Change(tuple((v, d) for d in served), tuple(new))


def _exchanges(search: _Search, slow: list[Edge], pairs: list[Edge]) -> Iterator[Change]:
    """Two verifiers exchange drafters; pointless where these are alike."""
    model = search.model
    for edge in slow:
        for other in pairs:
            new = (edge[0], other[1]), (other[0], edge[1])
            faster = model.slowness(other[1]) < model.slowness(edge[1])
            if faster and all(search.may_add(each) for each in new):
                yield Change((edge, other), new)


def _best(values: Array, count: int) -> list[int]:
    """Places of the smallest values, smallest first."""
    chosen = np.argpartition(values, count)[:count] if len(values) > count else np.arange(len(values))
    places: list[int] = chosen[np.argsort(values[chosen], kind="stable")].tolist()
    return places
