"""An upper bound of what any assignment of a large fleet is predicted to bring, each drafter with its own speed.  Pure.

A verifier with n requests and m drafters does what they bring together, n/m (1 + extra * quality) / cycle for each of them, and
its cycle is no shorter than any one of them alone makes it.  Give each verifier a worth U, no less than it does without drafts,
and let a pair of a verifier with m drafters be worth its part less U / m.  Then for every assignment

    tokens per second <= sum of U + sum over drafters of the worth of its pairs
                      <= sum of U + sum over drafters of the most that any pairs could be worth to it

whatever U is (weak duality).  U is what a verifier would gain if every drafter had one and the same price, the best of some
prices; descending further from there has been tried, and gained a thousandth.  A drafter with k pairs keeps each
waiting for k - 1 others; k need not be whole here.  What is left out: that m must be the same for all drafters of a verifier,
that a verifier waits for the slowest of them, and that one verifier can be in no two pairs of a drafter.  Verifiers with less
than one request hardly burden anybody: they get the best drafters for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from backend.coordinator.assignment import Situation
from backend.coordinator.model import FleetModel
from backend.coordinator.table import Array, Arrays

ONE_BY_ONE = 12
"""Drafters of one verifier that are told apart; more of them in ranges, each bounded by its most favourable ends."""
ROUGH = 24
"""Groups of drafters alike while U is searched for; the bound itself is of each drafter."""
PRICES = 24
CHUNK = 1 << 19
LEAST_S = 1e-9


@dataclass(frozen=True)
class _Columns:
    """Every verifier with every number of drafters, in one row."""

    verifier: Array
    least: Array
    """Drafters at least, for the share of U; ..."""
    share: Array
    """... requests of each at most so many drafters."""
    requests: Array
    verify_s: Array
    extra: Array
    overlap: Array


def bound_by_drafter(situation: Situation) -> float:
    """Tokens per second that no assignment is predicted to exceed."""
    known = FleetModel(replace(situation, bindings={}, pins={}), 0.0).arrays
    light = known.active < 1
    total = float(_at_best(known)[light].sum())
    heavy = np.flatnonzero(~light)
    drafters = np.column_stack((known.fixed_s, known.per_request_s, known.quality))
    if not len(heavy) or not len(drafters):
        return total + float((known.requests / known.plain_s)[heavy].sum())
    columns = _columns(known, heavy, len(drafters))
    worth = _search(known, heavy, columns, drafters)
    each, counts = np.unique(drafters, axis=0, return_counts=True)
    return total + float(worth.sum() + (_best_of(columns, each, worth) * counts).sum())


def _columns(known: Arrays, heavy: Array, drafters: int) -> _Columns:
    ranges = [(each, each) for each in range(1, min(ONE_BY_ONE, drafters) + 1)]
    for most in (2 * ONE_BY_ONE, 4 * ONE_BY_ONE, drafters):
        if most > ranges[-1][1]:
            ranges.append((ranges[-1][1] + 1, min(most, drafters)))
    least, upto = np.tile(np.array(ranges, dtype=float), (len(heavy), 1)).T
    place = np.repeat(np.arange(len(heavy)), len(ranges))
    v = heavy[place]
    n = known.requests[v]
    return _Columns(place, least, n / upto, n, known.drafted_s[v], known.extra[v], known.overlap[v])


def _at_best(known: Arrays) -> Array:
    """What each verifier does with infinitely many of the best drafters, or without."""
    plain = known.requests / known.plain_s
    if not len(known.fixed_s):
        return plain
    delay = known.fixed_s.min()
    cycle = known.drafted_s + delay - known.overlap * np.minimum(known.drafted_s, delay)
    result: Array = np.maximum(plain, known.requests * (1 + known.extra * known.quality.max()) / cycle)
    return result


def _search(known: Arrays, heavy: Array, columns: _Columns, drafters: Array) -> Array:
    """A worth of each verifier that makes the bound small."""
    order = np.argsort(drafters[:, 0] + drafters[:, 1] * float(columns.share.mean()), kind="stable")
    parts = np.array_split(drafters[order], min(ROUGH, len(drafters)))
    groups, sizes = np.array([part.mean(axis=0) for part in parts]), np.array([len(part) for part in parts], dtype=float)
    floor, ceiling = (known.requests / known.plain_s)[heavy], _at_best(known)[heavy]
    fixed_s, per_request_s, quality = drafters.mean(axis=0)
    delay = fixed_s + per_request_s * columns.share
    cycle = columns.verify_s + delay - columns.overlap * np.minimum(columns.verify_s, delay)
    goodput = (columns.requests * (1 + columns.extra * quality) / cycle).reshape(len(heavy), -1)
    least = columns.least.reshape(len(heavy), -1)
    prices = np.geomspace(1e-4, 1.0, PRICES) * float(goodput.max())
    # The ceiling is for drafters so fast that any number of verifiers may share one.
    tried = [np.maximum(floor, (goodput - price * least).max(axis=1)) for price in prices.tolist()]
    tried += [np.maximum(each, ceiling) for each in tried[:1]]
    return min(tried, key=lambda worth: float(worth.sum() + (sizes * _best_of(columns, groups, worth)).sum()))


def _best_of(columns: _Columns, drafters: Array, worth: Array) -> Array:
    """For each drafter the most that its pairs are worth."""
    size = max(CHUNK // len(columns.verifier), 1)
    return np.concatenate([_best_of_some(columns, drafters[at : at + size], worth) for at in range(0, len(drafters), size)])


def _best_of_some(columns: _Columns, drafters: Array, worth: Array) -> Array:
    fixed_s, per_request_s, quality = (each[:, None] for each in drafters.T)
    brings = columns.requests * (1 + columns.extra * quality)
    delay = fixed_s + per_request_s * columns.share
    other = 0.5 * fixed_s * fixed_s / (float(columns.verify_s.max()) + fixed_s)
    wants, most = worth[columns.verifier], len(worth)
    plain = 1 - columns.overlap
    value = np.full(delay.shape, np.inf)
    # The cycle is the longer of two lines in k; on each of them k has a best value, and the lesser of the two bounds both.
    for cycle, wait in ((columns.verify_s + plain * delay, plain * other), (plain * columns.verify_s + delay, other)):
        wait = np.maximum(wait, LEAST_S)
        k = 1 + (np.sqrt(brings * np.maximum(cycle - wait, 0) / wants) - cycle) / wait
        k = np.clip(k, 1, most)
        value = np.minimum(value, k * (brings / (cycle + wait * (k - 1)) - wants))
    result: Array = np.maximum((value / columns.least).max(axis=1), 0.0)
    return result
