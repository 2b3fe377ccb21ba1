"""When a head begins to learn, when a candidate replaces it, and when a predecessor comes back.  Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

LEAST_GAIN = 0.02
"""Of the acceptance length: a new head costs every running request its drafter's cache."""
FEWEST = 8
"""Sequences that a comparison needs."""
SURE = 1.64
"""Standard errors of a one-sided bound of 95 %."""

COMPARED = 4
"""Drafts of a sequence that must have been compared with its text: shares of fewer say little."""
KEPT = 64
"""Sequences, the latest."""
FEWEST_SEQUENCES = 4
TOLERATED = 0.95
"""Share of the earlier acceptance that is not called less."""
VERY_SURE = 3.0
"""Standard errors: traffic changes by itself, and every token is one more test."""
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
    """Live acceptance before and after the latest head: of drafts compared with the text, those whose first token is right.

    Each sequence is one observation: drafts for the same text are right or wrong together.
    """

    def __init__(self, before: Sequence[float] = ()) -> None:
        self._counts: dict[Hashable, tuple[int, int]] = {}
        self.before = before
        """Each sequence's share of right drafts, of the head that the present one is compared with."""
        self._first: list[float] = []
        self.knows_previous = True
        """Whether what later heads are compared with is of the head before the latest exchange: it was long enough in use."""

    @property
    def acceptance(self) -> float | None:
        """That of the present head, a mean over sequences; None: not known yet."""
        shares = self._shares()
        return sum(shares) / len(shares) if shares else None

    def note(self, key: Hashable, is_right: bool) -> None:
        """A draft of the present head for this sequence was compared with the text."""
        right, seen = self._counts.get(key, (0, 0))
        self._counts[key] = right + is_right, seen + 1
        if len(self._counts) > KEPT:
            if len(self._first) < FEWEST_SEQUENCES:
                self._first = self._shares()
            del self._counts[next(iter(self._counts))]

    def exchanged(self) -> None:
        """Another head drafts from now on."""
        shares = self._shares()
        self.knows_previous = len(shares) >= FEWEST_SEQUENCES
        if self.knows_previous:
            self.before = shares
        self._counts = {}
        self._first = []

    @property
    def has_fallen(self) -> bool:
        """Whether the present head is accepted less than the one before, for sure and by enough."""
        return _is_less(self.before, self._shares())

    @property
    def needs_learning(self) -> bool:
        """Whether few of the present head's drafts are accepted, or fewer than at first."""
        latest = self._shares()
        if len(self._first) < FEWEST_SEQUENCES or len(latest) < FEWEST_SEQUENCES:
            return False
        mean, variance = _moments(latest)
        return mean + VERY_SURE * math.sqrt(variance / len(latest)) < LOW or _is_less(self._first, latest)

    def _shares(self) -> list[float]:
        return [right / seen for right, seen in list(self._counts.values()) if seen >= COMPARED]


def _is_less(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether acceptance fell, for sure and by enough."""
    if len(before) < FEWEST_SEQUENCES or len(after) < FEWEST_SEQUENCES:
        return False
    (old, old_spread), (new, new_spread) = _moments(before), _moments(after)
    # Few observations are often alike by chance.
    error = math.sqrt(max(old_spread, new_spread) * (1 / len(before) + 1 / len(after)))
    return new < TOLERATED * old and old - new > VERY_SURE * error


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)
