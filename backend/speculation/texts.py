"""Sources of drafts that need no drafter: a text in which the request's latest tokens occur is read on from there.  Pure.

Scheduler's process and thread.  There are three such texts: the request's own (`own_text.py`), the answer that the client
predicts (`prediction.py`), and the outputs of other requests (`shared.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

FORGET = 0.9
"""Weight of a draft's score after each newer draft: text may begin or cease to repeat itself within a sentence."""


class LookupSource(ABC):
    """One text, as one request sees it."""

    kind: str
    """The source's name in counters."""

    def __init__(self) -> None:
        self._right = self._wrong = 0.0
        """Decayed counts of draft tokens that were right and wrong."""

    @abstractmethod
    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """A draft of at most `k` tokens to follow `text`, and its signs, two per token; empty if none is found.

        `text`: all of the request's tokens; they only ever grow.
        """

    def advance(self, text: Sequence[int], most: int) -> int:
        """Indexes up to `most` of the request's new tokens; returns how many.  Runs while the device computes."""
        return 0

    def scored(self, matched: int, seen: int) -> None:
        """Takes the result of comparing a draft with the text (`guesses.Resolved`)."""
        self._right = FORGET * self._right + matched
        self._wrong = FORGET * self._wrong + seen - matched

    def _signs(self, agreed: int, count: int) -> list[float]:
        """Signs for `count` tokens: the log-odds of recent drafts, and how many tokens agree before the draft, less 3."""
        return [math.log((self._right + 1) / (self._wrong + 1)), agreed - 3.0] * count
