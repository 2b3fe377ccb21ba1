"""Drafts from a request's own text: prompt lookup on the verifier.  Pure; scheduler's process and thread."""

from collections.abc import Sequence

from backend.speculation.lookup import LONGEST, SHORTEST, Lookup
from backend.speculation.texts import LookupSource

WINDOW = 4096
"""Only the last 4096 tokens of a prompt are indexed: bounds the memory of a request to about a megabyte."""


class OwnText(LookupSource):
    """The own text of one request.  Nothing is found before the first `advance`."""

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
