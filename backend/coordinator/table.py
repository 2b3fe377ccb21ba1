"""The members and pairs of a situation as columns of numbers, by place.  Pure.

A decision looks at thousands of members at once; reading each of their objects would take longer than deciding.  A coordinator
keeps one table for as long as nobody comes or goes, and writes into it what it hears (`read_verifier`, `read_drafter`) and does
(`forget_pairs`).  Everybody else has `Table.of` make one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backend.coordinator.assignment import DrafterSpeed, Pair, Situation, VerifierLoad

Array = np.ndarray[Any, np.dtype[Any]]

IDLE_REQUESTS = 0.25
"""A verifier without work counts as so many requests: its first one is to find a drafter."""
PRIOR_PLAIN_S, PRIOR_EXTRA, PRIOR_LENGTH = 0.03, 1.2, 2.5
PRIOR_FIXED_S, PRIOR_PER_REQUEST_S = 0.006, 0.0005
"""Before anything was measured anywhere.  Only their proportions matter, and only until the first requests were served."""
HEAVIEST = 2.0
"""A straggler's tokens count for so much more at most, and a fast verifier's for so much less."""


class Table:
    """What is not measured is NaN."""

    def __init__(
        self, verifiers: Sequence[VerifierLoad], drafters: Sequence[DrafterSpeed], bindings: Mapping[Pair, float]
    ) -> None:
        self.verifiers, self.drafters, self.bindings = verifiers, drafters, bindings
        self.place_of_verifier = {each.id: place for place, each in enumerate(verifiers)}
        self.place_of_drafter = {each.id: place for place, each in enumerate(drafters)}
        self.down: dict[int, frozenset[str]] = {}
        """By place of the drafter: verifiers that do not wait for it."""
        self._loads, self._speeds = np.empty((len(verifiers), 8)), np.empty((len(drafters), 3))
        self._pairs: tuple[Array, Array] | None = None
        for name in self.place_of_verifier:
            self.read_verifier(name)
        for name in self.place_of_drafter:
            self.read_drafter(name)

    @staticmethod
    def of(situation: Situation) -> Table:
        """The one that came with a situation where it is of the same members and pairs, else a new one."""
        known = situation.table
        if (
            known is not None
            and known.verifiers is situation.verifiers
            and known.drafters is situation.drafters
            and known.bindings is situation.bindings
        ):
            return known
        return Table(situation.verifiers, situation.drafters, situation.bindings)

    # What has changed.

    def read_verifier(self, verifier_id: str) -> None:
        """Reads one verifier's load again; ids that are not there are passed over."""
        place = self.place_of_verifier.get(verifier_id)
        if place is not None:
            it = self.verifiers[place]
            row = it.requests, it.plain_s, it.drafted_s, it.length, it.overlap, it.may_skip, it.tgs, it.bare_s
            self._loads[place] = row

    def read_drafter(self, drafter_id: str) -> None:
        """The same of a drafter."""
        place = self.place_of_drafter.get(drafter_id)
        if place is not None:
            it = self.drafters[place]
            self._speeds[place] = it.fixed_s, it.per_request_s, it.quality
            if it.down_for:
                self.down[place] = it.down_for
            else:
                self.down.pop(place, None)

    def forget_pairs(self) -> None:
        """The bindings are not what they were."""
        self._pairs = None

    # What there is.

    def loads(self) -> Array:
        """Rows of requests, plain_s, drafted_s, length, overlap, may_skip, tgs, bare_s: `[8, verifiers]`; a copy."""
        return np.ascontiguousarray(self._loads.T)

    def speeds(self) -> Array:
        """Rows of fixed_s, per_request_s, quality: `[3, drafters]`; a copy."""
        return np.ascontiguousarray(self._speeds.T)

    def pairs(self) -> tuple[Array, Array]:
        """Pairs of members that are here, by verifier: places of the verifiers, places of the drafters."""
        if self._pairs is None:
            places = [(self.place_of_verifier.get(v, -1), self.place_of_drafter.get(d, -1)) for v, d in self.bindings]
            both = np.array(places, dtype=np.int64).reshape(-1, 2)
            both = both[(both >= 0).all(axis=1)]
            both = both[np.argsort(both[:, 0], kind="stable")]
            self._pairs = both[:, 0].copy(), both[:, 1].copy()
        return self._pairs


class Arrays:
    """What is known of all members, or taken to be.  Fields are by place."""

    def __init__(self, table: Table, straggler_weight: float) -> None:
        requests, plain_s, drafted_s, length, overlap, may_skip, tgs, bare_s = table.loads()
        fixed_s, per_request_s, quality = table.speeds()
        self.requests: Array = np.maximum(requests, IDLE_REQUESTS)
        """A verifier's; never nothing."""
        self.active: Array = np.minimum(requests, 1.0)
        self.plain_s = _known(plain_s, PRIOR_PLAIN_S)
        self.bare_s: Array = np.where(bare_s > 0, bare_s, self.plain_s)
        grown = (drafted_s / plain_s)[(drafted_s == drafted_s) & (plain_s > 0)]
        slower = float(grown.mean()) if len(grown) else PRIOR_EXTRA
        self.drafted_s: Array = np.where(drafted_s > 0, drafted_s, slower * self.plain_s)
        self.extra: Array = _known(length, PRIOR_LENGTH) - 1
        """Draft tokens accepted by a verification."""
        self.overlap, self.may_skip = overlap, may_skip > 0
        self.weight = _weights(np.where(requests >= 0.5, tgs, np.nan), straggler_weight)
        self.fixed_s = _known(fixed_s, PRIOR_FIXED_S)
        self.per_request_s = _known(per_request_s, PRIOR_PER_REQUEST_S)
        self.quality = quality
        share = float(self.requests.mean()) if len(requests) else 1.0
        self.slowness: Array = (self.fixed_s + self.per_request_s * share) / np.maximum(quality, 0.01)
        """Time of a round of average size over the drafter's quality; less is better."""


class Lists:
    """The same for looking at one member: numbers out of lists are much faster than out of arrays."""

    def __init__(self, arrays: Arrays) -> None:
        self.requests: list[float] = arrays.requests.tolist()
        self.active: list[float] = arrays.active.tolist()
        self.plain_s: list[float] = arrays.plain_s.tolist()
        self.bare_s: list[float] = arrays.bare_s.tolist()
        self.drafted_s: list[float] = arrays.drafted_s.tolist()
        self.extra: list[float] = arrays.extra.tolist()
        self.overlap: list[float] = arrays.overlap.tolist()
        self.may_skip: list[bool] = arrays.may_skip.tolist()
        self.weight: list[float] = arrays.weight.tolist()
        self.fixed_s: list[float] = arrays.fixed_s.tolist()
        self.per_request_s: list[float] = arrays.per_request_s.tolist()
        self.quality: list[float] = arrays.quality.tolist()
        self.slowness: list[float] = arrays.slowness.tolist()


def _known(values: Array, prior: float) -> Array:
    """Each value where it is known, else the mean of those that are, else the prior."""
    is_known = values == values
    if is_known.all():
        return values
    mean = float(values[is_known].mean()) if is_known.any() else prior
    result: Array = np.where(is_known, values, mean)
    return result


def _weights(tgs: Array, straggler_weight: float) -> Array:
    """(mean / a verifier's TGS) to this power; 1 where that is not known."""
    weight, is_known = np.ones(len(tgs)), tgs > 0
    if is_known.any():
        its = (float(tgs[is_known].mean()) / tgs[is_known]) ** straggler_weight
        weight[is_known] = np.clip(its, 1 / HEAVIEST, HEAVIEST)
    return weight
