"""How good an assignment could be, by the same model that the policy predicts with.  Pure.

On small fleets the best assignment that uses every drafter is found exactly: of those where each drafter has one verifier
(`best_partition`; the other way round where drafters are fewer), by dynamic programming over subsets, and of all assignments
whatever (`best_graph`), one by one.  On large ones `upper_bound` is a Lagrangian bound that no assignment exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from backend.coordinator.assignment import Pair, Situation
from backend.coordinator.model import FleetModel
from backend.coordinator.table import Array

MOST_DRAFTERS = 64
"""Drafters of one verifier that are looked at one by one; more of them are bounded by infinitely many."""
STEPS = 200


def predicted(situation: Situation, pairs: Iterable[Pair]) -> float:
    """Tokens per second of an assignment."""
    return FleetModel(replace(situation, bindings=dict.fromkeys(pairs, 0.0), pins={}), 0.0).total()


def best_partition(situation: Situation) -> float:
    """The best where the less numerous side is shared and the other is not; verifiers may stay alone."""
    verifiers, drafters = [each.id for each in situation.verifiers], [each.id for each in situation.drafters]
    model = FleetModel(replace(situation, bindings={}, pins={}), 0.0)
    if len(drafters) >= len(verifiers):

        def worth(group: int, members: list[int]) -> float:
            with_them = _of_pairs(model, [(group, d) for d in members])
            return with_them - model.goodput(group)[1]

        gained = _partition(len(verifiers), len(drafters), worth, may_be_empty=True)
    else:

        def worth(group: int, members: list[int]) -> float:
            with_it = _of_pairs(model, [(v, group) for v in members])
            return with_it - sum(model.goodput(v)[1] for v in members)

        gained = _partition(len(drafters), len(verifiers), worth, may_be_empty=False)
    return predicted(situation, ()) + gained


def best_graph(situation: Situation) -> float:
    """The best of all 2^(verifiers * drafters) assignments; for a dozen possible pairs at most."""
    every = [(v.id, d.id) for v in situation.verifiers for d in situation.drafters]
    if len(every) > 12:
        raise ValueError(f"{len(every)} possible pairs are too many to try every assignment")
    chosen = ([pair for i, pair in enumerate(every) if bits >> i & 1] for bits in range(1 << len(every)))
    drafters = len(situation.drafters)
    return max(predicted(situation, pairs) for pairs in chosen if len({d for _, d in pairs}) == drafters)


def upper_bound(situation: Situation) -> float:
    """No assignment is predicted to bring more.

    A verifier with m drafters keeps them busy for u(m) of the time, all together no more than there are drafters; whoever waits
    for whom is left out, and every drafter is taken to be the best.  Weak duality: for each price p of a drafter,
    p * drafters + sum of max over m of goodput(m) - p * u(m) is a bound; the least over p is returned.
    """
    goodput, busy = _by_count(situation)
    count = len(situation.drafters)
    low, high = 0.0, float((goodput[:, -1] / np.maximum(busy[:, 1], 1e-9)).max(initial=0.0))

    def bound(price: float) -> float:
        return price * count + float((goodput - price * busy).max(axis=1, initial=-np.inf).sum())

    # Convex in the price: ternary search.
    for _ in range(STEPS):
        third = (high - low) / 3
        if bound(low + third) < bound(high - third):
            high -= third
        else:
            low += third
    return bound((low + high) / 2)


def _by_count(situation: Situation) -> tuple[Array, Array]:
    """Goodput and use of drafters by verifier and number of drafters: 0, 1, 2, ..., infinitely many."""
    model = FleetModel(replace(situation, bindings={}, pins={}), 0.0)
    known = model.arrays
    fixed_s, per_request_s, quality = known.fixed_s.min(), known.per_request_s.min(), known.quality.max()
    count = np.array([*range(1, min(len(situation.drafters), MOST_DRAFTERS) + 1), np.inf])
    n, verify_s = known.requests[:, None], known.drafted_s[:, None]
    draft_s = fixed_s + per_request_s * n / count
    cycle = verify_s + draft_s - known.overlap[:, None] * np.minimum(verify_s, draft_s)
    plain = (known.requests / known.plain_s)[:, None]
    drafted = n * (1 + known.extra[:, None] * quality) / cycle
    used = np.minimum(count, MOST_DRAFTERS)
    busy = known.active[:, None] * (used * fixed_s + per_request_s * n) / cycle
    goodput = np.where(known.may_skip[:, None], np.maximum(drafted, plain), drafted)
    bare = (known.requests / known.bare_s)[:, None]
    return np.hstack((bare, goodput)), np.hstack((np.zeros_like(plain), busy))


def _of_pairs(model: FleetModel, pairs: list[tuple[int, int]]) -> float:
    """Goodput of the verifiers in `pairs`, were these the only pairs."""
    model.apply((), pairs)
    total = sum(model.best(v) for v in {v for v, _ in pairs})
    model.apply(pairs, ())
    return total if pairs else 0.0


def _partition(groups: int, members: int, worth: Callable[[int, list[int]], float], may_be_empty: bool) -> float:
    """The most that `groups` can be worth together.

    Each member belongs to one group; where groups may not be empty, a member may be left out instead.
    """
    every = 1 << members
    nothing = 0.0 if may_be_empty else -math.inf
    best = [0.0] + [-math.inf if may_be_empty else 0.0] * (every - 1)
    for group in range(groups):
        its = [nothing, *(worth(group, [i for i in range(members) if bits >> i & 1]) for bits in range(1, every))]
        best = [_best_split(best, its, bits) for bits in range(every)]
    return best[-1]


def _best_split(best: list[float], its: list[float], bits: int) -> float:
    found, part = best[bits] + its[0], bits
    while part:
        found = max(found, best[bits ^ part] + its[part])
        part = (part - 1) & bits
    return found
