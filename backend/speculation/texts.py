"""Drafts that need no drafter: what a text goes on with where a request's latest tokens stand in it.  Pure.

Scheduler's process and thread.  A request reads its own text (`own_text.py`), what its client expects of the answer
(`prediction.py`), and what other requests generated (`shared.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

FORGET = 0.9
"""Weight of a draft after one newer one: text turns from copying to not copying within sentences."""


class TextSource(ABC):
    """One text, as one request reads it."""

    kind: str
    """The name of the source in counters and records."""

    def __init__(self) -> None:
        self._right = self._wrong = 0.0
        """Tokens of its drafts that were right and wrong, decayed."""

    @abstractmethod
    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """At most `k` tokens to follow `text`, and two signs for each; nothing where none is found.

        `text`: all of the request's tokens, which only ever grow.
        """

    def advance(self, text: Sequence[int], most: int) -> int:
        """Makes the request's newest tokens findable, `most` at a time; returns how many.  Called while the device computes."""
        return 0

    def scored(self, matched: int, seen: int) -> None:
        """A draft was compared with what followed (`guesses.Resolved`)."""
        self._right = FORGET * self._right + matched
        self._wrong = FORGET * self._wrong + seen - matched

    def _signs(self, agreed: int, count: int) -> list[float]:
        """For `count` tokens: the log-odds of recent drafts, and how much longer than usual the agreement before them is."""
        return [math.log((self._right + 1) / (self._wrong + 1)), agreed - 3.0] * count
