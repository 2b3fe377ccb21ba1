"""Drafts from the answer that a client predicts (OpenAI's `prediction`).  Pure; scheduler's process and thread.

The answer is compared with the prediction token by token.  Where they part, the answer's latest tokens are looked up in the
prediction: the longest matching suffix of `SHORTEST..LONGEST` tokens.  Among equally long matches, one behind the point of
parting is preferred, then the nearest.  Of a pair of tokens that occurs often, the `NEAREST` places are compared.
"""

from bisect import bisect
from collections.abc import Sequence

from backend.speculation.lookup import LONGEST, SHORTEST
from backend.speculation.texts import LookupSource

SURE = 8
"""Agreeing tokens that count in a sign; more say nothing new."""
NEAREST = 64
"""Places compared in one search, so that a repetitive prediction does not slow the engine."""


class PredictedText(LookupSource):
    """The predicted answer of one request."""

    kind = "prediction"

    def __init__(self, tokens: Sequence[int], began: int) -> None:
        """`began`: the length of the request's prompt."""
        super().__init__()
        self._tokens = tokens
        self._began = self._read = began
        self._at = 0
        """Where in the prediction the answer goes on; after they parted, where they did."""
        self._agreed = 0
        """How many of the answer's latest tokens agree; 0: answer and prediction have parted."""
        self._places: dict[tuple[int, ...], list[int]] | None = None
        """Where each pair of tokens ends in the prediction.  Made when answer and prediction first part."""

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """As in `LookupSource`."""
        self._follow(text)
        tokens = list(self._tokens[self._at : self._at + k]) if self._agreed else []
        return tokens, self._signs(min(self._agreed, SURE), len(tokens))

    def _follow(self, text: Sequence[int]) -> None:
        tokens, follows = self._tokens, self._agreed or self._read == self._began
        while follows and self._read < len(text) and self._at < len(tokens) and tokens[self._at] == text[self._read]:
            self._at, self._read, self._agreed = self._at + 1, self._read + 1, self._agreed + 1
        if self._read < len(text):
            self._read, self._agreed = len(text), 0
            self._find(text[max(self._began, len(text) - LONGEST) :])

    def _find(self, ending: Sequence[int]) -> None:
        """Looks up the answer's `ending` in the prediction."""
        tokens = self._tokens
        if self._places is None:
            self._places = {}
            for place in range(1, len(tokens)):
                self._places.setdefault((tokens[place - 1], tokens[place]), []).append(place)
        best, found = (0, False, 0), 0
        places = self._places.get(tuple(ending[-SHORTEST:]), [])
        first = max(min(bisect(places, self._at) - NEAREST // 2, len(places) - NEAREST), 0)
        for place in places[first : first + NEAREST]:
            size = SHORTEST
            while size < len(ending) and size <= place and tokens[place - size] == ending[-1 - size]:
                size += 1
            rank = size, place >= self._at, -abs(place - self._at)
            if rank > best:
                best, found = rank, place
        if best[0]:
            self._agreed, self._at = best[0], found + 1
