"""Sources of drafts that need no drafter: a text in which the request's latest tokens occur is read on from there.  Pure.

Scheduler's process and thread.  There are three such texts: the request's own (`OwnText`), the answer that the client
predicts (`prediction.py`), and the outputs of other requests (`shared.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from backend.speculation.lookup import LONGEST, SHORTEST, Lookup

WINDOW = 4096
"""Only the last 4096 tokens of a prompt are indexed: bounds the memory of a request to about a megabyte."""
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


class OwnText(LookupSource):
    """The own text of one request: prompt lookup on the verifier.  Nothing is found before the first `advance`."""

    kind = "lookup"

    def __init__(self) -> None:
        super().__init__()
        self._lookup: Lookup | None = None

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """As in `LookupSource`."""
        lookup = self._lookup
        if lookup is None:
            return [], []
        lookup.tokens.extend(text[len(lookup.tokens) :])
        tokens = lookup.look_up(k)
        return tokens, self._signs(lookup.found, len(tokens))

    def advance(self, text: Sequence[int], most: int) -> int:
        """As in `LookupSource`."""
        if self._lookup is None:
            self._lookup = Lookup([], SHORTEST, LONGEST, max(len(text) - WINDOW, 0))
        self._lookup.tokens.extend(text[len(self._lookup.tokens) :])
        return self._lookup.index(most)
