"""When a head begins to learn, when a candidate replaces it, and when a predecessor comes back.  Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

LEAST_GAIN = 0.02
"""Of the acceptance length: a new head costs every running request its drafter's cache."""
FEWEST = 8
"""Sequences that a comparison needs."""
SURE = 1.64
"""Standard errors of a one-sided bound of 95 %."""

BLOCK = 16
"""Compared draft tokens that make one observation of live acceptance; those of a request depend on each other."""
KEPT_BLOCKS = 64
FEWEST_BLOCKS = 4
TOLERATED = 0.95
"""Share of the earlier acceptance that is not called less."""
VERY_SURE = 3.0
"""Standard errors: traffic changes by itself, and every block is one more test."""
LOW = 0.6
"""Acceptance below which a given head is worth teaching."""


def bound_of_gain(present: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Lower bound of the relative gain, from acceptance lengths of both on the same sequences; None: too few of them."""
    count = len(present)
    if count < FEWEST:
        return None
    gains = [new - old for old, new in zip(present, candidate, strict=True)]
    mean = sum(gains) / count
    variance = sum((gain - mean) ** 2 for gain in gains) / (count - 1)
    return (mean - SURE * math.sqrt(variance / count)) / (sum(present) / count)


def is_worth_publishing(present: Sequence[float], candidate: Sequence[float]) -> bool:
    """Whether the candidate is better for sure, and by enough."""
    bound = bound_of_gain(present, candidate)
    return bound is not None and bound > LEAST_GAIN


class Watch:
    """Live acceptance before and after the latest head: right draft tokens among those compared with the text."""

    def __init__(self) -> None:
        self._blocks: deque[float] = deque(maxlen=KEPT_BLOCKS)
        self._before: list[float] = []
        self._first: list[float] = []
        self.knows_previous = True
        """Whether what later heads are compared with is of the head before the latest exchange: it was long enough in use."""
        self._right = self._seen = 0

    @property
    def acceptance(self) -> float | None:
        """Share of right tokens with the present head; None: not known yet."""
        blocks = list(self._blocks)
        return sum(blocks) / len(blocks) if blocks else None

    def note(self, right: int, seen: int) -> None:
        """A draft of the present head: tokens compared with the text, and how many of them were right."""
        self._right, self._seen = self._right + right, self._seen + seen
        if self._seen >= BLOCK:
            self._blocks.append(self._right / self._seen)
            self._right = self._seen = 0
            if len(self._first) < KEPT_BLOCKS:
                self._first.append(self._blocks[-1])

    def exchanged(self) -> None:
        """Another head drafts from now on."""
        self.knows_previous = len(self._blocks) >= FEWEST_BLOCKS
        if self.knows_previous:
            self._before = list(self._blocks)
        self._blocks.clear()
        self._first.clear()
        self._right = self._seen = 0

    @property
    def has_fallen(self) -> bool:
        """Whether the present head is accepted less than the one before, for sure and by enough."""
        return _is_less(self._before, list(self._blocks))

    @property
    def needs_learning(self) -> bool:
        """Whether few of the present head's drafts are accepted, or fewer than at first."""
        latest = list(self._blocks)
        if len(latest) < KEPT_BLOCKS:
            return False
        mean, variance = _moments(latest)
        return mean + VERY_SURE * math.sqrt(variance / len(latest)) < LOW or _is_less(self._first, latest)


def _is_less(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether acceptance fell, for sure and by enough."""
    if len(before) < FEWEST_BLOCKS or len(after) < FEWEST_BLOCKS:
        return False
    (old, old_spread), (new, new_spread) = _moments(before), _moments(after)
    # Few observations are often alike by chance.
    error = math.sqrt(max(old_spread, new_spread) * (1 / len(before) + 1 / len(after)))
    return new < TOLERATED * old and old - new > VERY_SURE * error


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)
