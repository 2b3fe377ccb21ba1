"""Drafts from what other requests generated.  Pure; scheduler's process and thread.

Samples of one prompt, retries and files that are edited again and again repeat each other.  A request whose latest tokens
another one has generated, too, is read along with that one's output from there on (suffix decoding, arXiv 2411.04975, with the
latest occurrence in place of counts).  Outputs are findable while they grow, so requests that run at the same time draft for
each other.

Requests share within a tenant, and only those whose texts may be learned from.  What others generated changes no token.  A
request can tell from its speed, though, what another one of its tenant was answered.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from backend.speculation.texts import TextSource

SIZES = (8, 4)
"""Lengths of the endings that are looked up, the longest first, in tokens."""
KEPT = 1 << 17
"""Endings that can be found, of all requests and sizes: some 20 MB.  The older half is dropped at a time."""
SURE = 10
"""Tokens of agreement beyond which one more says nothing."""

Place = tuple[list[int], int]
"""An output, and where in it."""


class SharedTexts:
    """The outputs of all requests of one verifier, by their endings."""

    def __init__(self) -> None:
        self._young: dict[int, Place] = {}
        self._old: dict[int, Place] = {}
        self._salts: dict[str, int] = {}

    def reader(self, tenant: str, length: int) -> SharedText:
        """For a request of `tenant` that is `length` tokens long now; what it generates from now on is shared."""
        # With a secret per tenant, nobody can make up an ending that is found among another tenant's.
        return SharedText(self, self._salts.setdefault(tenant, secrets.randbits(62)), length)

    def find(self, ending: int) -> Place | None:
        """What follows the latest occurrence of an ending."""
        return self._young.get(ending) or self._old.get(ending)

    def add(self, ending: int, place: Place) -> None:
        """`place` follows an occurrence of this ending."""
        self._young[ending] = place
        if len(self._young) >= KEPT // 2:
            self._old, self._young = self._young, {}


class SharedText(TextSource):
    """One request's view of the others' outputs."""

    kind = "shared"

    def __init__(self, texts: SharedTexts, salt: int, length: int) -> None:
        super().__init__()
        self._texts, self._salt = texts, salt
        self._output: list[int] = []
        """What others may find of the request."""
        self._shared = self._read = length
        """The request's length as far as others find it, and as far as it was read along."""
        self._at: Place | None = None
        """Where the next token is expected."""
        self._agreed = 0

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """As in `TextSource`."""
        self._follow(text)
        if self._at is None:
            return [], []
        output, at = self._at
        tokens = output[at : at + k]
        return tokens, self._signs(min(self._agreed, SURE), len(tokens))

    def advance(self, text: Sequence[int], most: int) -> int:
        """As in `TextSource`."""
        end = min(len(text), self._shared + most)
        for place in range(self._shared, end):
            self._output.append(text[place])
            for size in SIZES:
                if place >= size:
                    self._texts.add(hash((self._salt, *text[place - size : place])), (self._output, len(self._output) - 1))
        advanced, self._shared = end - self._shared, end
        return advanced

    def _follow(self, text: Sequence[int]) -> None:
        """Reads on, and looks for another place where the output that was read ends or differs."""
        if self._at is not None:
            output, at = self._at
            while self._read < len(text) and at < len(output) and output[at] == text[self._read]:
                at, self._read, self._agreed = at + 1, self._read + 1, self._agreed + 1
            self._at = (output, at) if self._read == len(text) and at < len(output) else None
        if self._at is None:
            self._read = len(text)
            for size in SIZES:
                found = self._texts.find(hash((self._salt, *text[-size:]))) if len(text) >= size else None
                if found is not None and found[0] is not self._output:
                    self._at, self._agreed = found, size
                    return
