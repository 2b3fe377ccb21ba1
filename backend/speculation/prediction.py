"""Drafts from what a client expects the answer to be (OpenAI's `prediction`).  Pure; scheduler's process and thread.

The answer is read along the prediction.  Where it leaves it, its latest tokens are looked up there: the longest suffix of
`SHORTEST..LONGEST` tokens, rather behind the place where it left than before, and the nearest of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.speculation.lookup import LONGEST, SHORTEST
from backend.speculation.texts import TextSource

SURE = 8
"""Tokens of agreement beyond which one more says nothing."""


class Prediction(TextSource):
    """One request's."""

    kind = "prediction"

    def __init__(self, tokens: Sequence[int], began: int) -> None:
        """`began`: the length of the request's prompt."""
        super().__init__()
        self._tokens = tokens
        self._began = self._read = began
        self._at = 0
        """The place that follows what has been read; what was left is looked for from there on."""
        self._agreed = 0
        """Latest tokens that agree; 0: the answer is not on the prediction."""
        self._places: dict[int, list[int]] | None = None
        """Of each token.  Made when the answer first leaves the prediction."""

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """As in `TextSource`."""
        self._follow(text)
        tokens = list(self._tokens[self._at : self._at + k]) if self._agreed else []
        return tokens, self._signs(min(self._agreed, SURE), len(tokens))

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
        """Where the prediction has the answer's `ending`, if anywhere."""
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
