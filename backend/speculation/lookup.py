"""Prompt lookup: drafts from a request's own text (Saxena 2023; vLLM's `ngram`).  Pure; any process and thread.

The longest suffix of `shortest..longest` tokens that occurred before is looked up; the tokens after its latest occurrence are
the draft.  A draft that reaches the request's end goes on with its own first tokens, so that a period of two repeats for all K.
The n-gram drafter and the verifier's own prompt lookup both use `Lookup`.
"""

from backend.speculation.tokens import UNKNOWN, splice

SHORTEST, LONGEST = 2, 4
"""Length in tokens of a suffix that is looked up."""


class Lookup:
    """One request's tokens, and for each n-gram from `first` on, the position after its latest occurrence before the end."""

    def __init__(self, tokens: list[int], shortest: int, longest: int, first: int = 0) -> None:
        self.tokens = tokens
        self.found = 0
        """Length of the suffix found by the latest successful look-up."""
        self._sizes = range(shortest, longest + 1)
        self._after: dict[tuple[int, ...], int] = {}
        self._first = self._indexed = first

    def update(self, base_len: int, tokens: list[int]) -> None:
        """Makes the text `base_len` long and end with `tokens`.  If indexed tokens change, all are indexed anew."""
        if splice(self.tokens, base_len, tokens) < self._indexed:
            self._after.clear()
            self._indexed = self._first

    def draft(self, k: int) -> list[int]:
        """A draft of at most `k` tokens, after indexing the tokens that have come."""
        self.index()
        return self.look_up(k)

    def look_up(self, k: int) -> list[int]:
        """A draft of at most `k` tokens, without indexing new tokens first."""
        tokens, count, begin = self.tokens, len(self.tokens), None
        for size in self._sizes:
            # A suffix that did not occur is no part of a longer one that did.
            follows = self._after.get(tuple(tokens[-size:])) if count >= size else None
            if follows is None:
                break
            self.found, begin = size, follows
        drafted: list[int] = []
        for at in range(begin, begin + k) if begin is not None else ():
            token = tokens[at] if at < count else drafted[at - count]
            if token == UNKNOWN:
                break
            drafted.append(token)
        return drafted

    def index(self, most: int | None = None) -> int:
        """Indexes tokens that came since the last call, at most `most`; returns how many."""
        tokens, after_of, first, begin = self.tokens, self._after, self._first, self._indexed
        end = len(tokens) if most is None else min(len(tokens), begin + most)
        if end <= begin:
            return 0
        holes = UNKNOWN in tokens[max(begin - self._sizes[-1], 0) : end]
        for size in self._sizes:
            for after in range(max(begin, first + size), end):
                gram = tuple(tokens[after - size : after])
                if not (holes and UNKNOWN in gram):
                    after_of[gram] = after
        self._indexed = end
        return end - begin
