"""Decides when a head begins to learn, when a candidate replaces it, and when the previous head comes back.  Pure."""

import math
from collections.abc import Hashable, Sequence
from statistics import fmean, variance

LEAST_GAIN = 0.02
"""Least relative gain in acceptance length of a new head, which costs all running requests their cache on the drafter."""
FEWEST = 8
"""Fewest sequences of a comparison."""
SURE = 1.64
"""Standard errors of a one-sided 95 % bound."""

COMPARED = 4
"""Fewest compared drafts of a sequence: a share of fewer says little."""
KEPT = 64
"""Sequences, those noted last, whose live acceptance counts."""
OPEN = 4096
"""Most sequences that are noted at a time: more than run at once."""
FEWEST_SEQUENCES = 4
"""Fewest sequences for judging live acceptance."""
TOLERATED = 0.95
"""Live acceptance has fallen if it is below this share of the earlier one."""
VERY_SURE = 3.0
"""Standard errors by which it must differ: traffic changes by itself, and every token is one more test."""
LOW = 0.6
"""Live acceptance below which a given head begins to learn."""


def bound_of_gain(present: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Lower bound of the relative gain, from acceptance lengths of both on the same sequences; None: too few of them.

    The gain is larger with 95 % confidence.
    """
    count = len(present)
    if count < FEWEST:
        return None
    gains = [new - old for old, new in zip(present, candidate, strict=True)]
    return (fmean(gains) - SURE * math.sqrt(variance(gains) / count)) / fmean(present)


class Watch:
    """Live acceptance of the present head and the one before it: the share of drafts whose first token is right.

    Each sequence is one observation: drafts for the same text are right or wrong together.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[int, int]] = {}
        self.before: Sequence[float] = ()
        """Shares of right drafts, one per sequence, of the head that the present head is compared with."""
        self._known = 0
        """Sequences with enough compared drafts."""
        self._first: list[float] = []
        self.knows_previous = True
        """Whether the head before the latest exchange was in use long enough for its acceptance to be known."""

    @property
    def acceptance(self) -> float | None:
        """Live acceptance of the present head, a mean over sequences; None: not known yet."""
        shares = self._shares_right()
        return fmean(shares) if shares else None

    def note_first_token(self, key: Hashable, is_right: bool) -> None:
        """Notes whether the first token of a draft for this sequence was right."""
        right, seen = self._counts.pop(key, (0, 0))
        self._counts[key] = right + is_right, seen + 1
        self._known += seen + 1 == COMPARED
        if self._known > KEPT and len(self._first) < FEWEST_SEQUENCES:
            self._first = self._shares_right()
        if len(self._counts) > OPEN:
            del self._counts[next(iter(self._counts))]

    def exchanged(self) -> None:
        """Another head drafts from now on."""
        shares = self._shares_right()
        self.knows_previous = len(shares) >= FEWEST_SEQUENCES
        if self.knows_previous:
            self.before = shares
        self._counts, self._known = {}, 0
        self._first = []

    def retargeted(self) -> None:
        """The target has other weights.  Acceptance under the earlier ones says nothing about which head is better."""
        self._counts, self.before = {}, []

    @property
    def has_fallen(self) -> bool:
        """Whether the present head is accepted clearly less than the one before."""
        return _is_less(self.before, self._shares_right())

    @property
    def needs_learning(self) -> bool:
        """Whether the present head's acceptance is low, or clearly less than at first."""
        latest = self._shares_right()
        if len(self._first) < FEWEST_SEQUENCES or len(latest) < FEWEST_SEQUENCES:
            return False
        at_most = fmean(latest) + VERY_SURE * math.sqrt(variance(latest) / len(latest))
        return at_most < LOW or _is_less(self._first, latest)

    def _shares_right(self) -> list[float]:
        return [right / seen for right, seen in list(self._counts.values()) if seen >= COMPARED][-KEPT:]


def _is_less(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether acceptance fell by enough, and with statistical confidence."""
    if len(before) < FEWEST_SEQUENCES or len(after) < FEWEST_SEQUENCES:
        return False
    old, new = fmean(before), fmean(after)
    # Few observations are often alike by chance: take the larger variance.
    error = math.sqrt(max(variance(before), variance(after)) * (1 / len(before) + 1 / len(after)))
    return new < TOLERATED * old and old - new > VERY_SURE * error
