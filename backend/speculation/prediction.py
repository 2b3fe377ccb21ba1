"""Drafts from the answer that a client predicts (OpenAI's `prediction`).  Pure; scheduler's process and thread.

The answer is compared with the prediction token by token.  Where they part, the answer's latest tokens are looked up in the
prediction: the longest matching suffix of `SHORTEST..LONGEST` tokens.  Among equally long matches, one behind the point of
parting is preferred, then the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.speculation.calibration import log_odds
from backend.speculation.lookup import LONGEST, SHORTEST

FORGET = 0.9
"""Weight of a draft's score after each newer draft."""
SURE = 8
"""Agreeing tokens that count in a sign; more say nothing new."""


class Prediction:
    """The predicted answer of one request."""

    def __init__(self, tokens: Sequence[int], began: int) -> None:
        """`began`: the length of the request's prompt."""
        self._tokens = tokens
        self._began = self._read = began
        self._at = 0
        """Where in the prediction the answer goes on; after they parted, where they did."""
        self._agreed = 0
        """How many of the answer's latest tokens agree; 0: answer and prediction have parted."""
        self._places: dict[int, list[int]] | None = None
        """Each token's places in the prediction.  Made when answer and prediction first part."""
        self._right = self._wrong = 0.0

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """A draft of at most `k` tokens to follow `text` (all the request's tokens), and its signs; empty if they have parted.

        Signs per token: the log-odds of recent drafts, and how long the answer has agreed.
        """
        self._follow(text)
        tokens = list(self._tokens[self._at : self._at + k]) if self._agreed else []
        return tokens, [log_odds(self._right, self._wrong), min(self._agreed, SURE) - 3.0] * len(tokens)

    def scored(self, matched: int, seen: int) -> None:
        """Takes the result of comparing a draft with the text (`guesses.Resolved`)."""
        self._right = FORGET * self._right + matched
        self._wrong = FORGET * self._wrong + seen - matched

    def _follow(self, text: Sequence[int]) -> None:
        tokens, follows = self._tokens, self._agreed or self._read == self._began
        while follows and self._read < len(text) and self._at < len(tokens):
            if tokens[self._at] != text[self._read]:
                follows = False
                break
            self._at, self._read, self._agreed = self._at + 1, self._read + 1, self._agreed + 1
        if self._read < len(text):
            self._read, self._agreed = len(text), 0
            self._find(text[max(self._began, len(text) - LONGEST) :])

    def _find(self, ending: Sequence[int]) -> None:
        """Looks up the answer's `ending` in the prediction."""
        tokens = self._tokens
        if self._places is None:
            self._places = {}
            for place, token in enumerate(tokens):
                self._places.setdefault(token, []).append(place)
        best, found = (0, False, 0), 0
        for place in self._places.get(ending[-1], ()):
            size = 1
            while size < len(ending) and size <= place and tokens[place - size] == ending[-1 - size]:
                size += 1
            rank = size, place >= self._at, -abs(place - self._at)
            if rank > best:
                best, found = rank, place
        if best[0] >= SHORTEST:
            self._agreed, self._at = best[0], found + 1
