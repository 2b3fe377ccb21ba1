"""Drafts from the outputs of other requests.  Pure; scheduler's process and thread.

Samples of one prompt, retries, and files that are edited again and again repeat each other.  When a request's latest tokens
occur in another request's output, the tokens that follow there are its draft (suffix decoding, arXiv 2411.04975; that paper
counts occurrences, this code takes the latest).  Outputs are indexed while they grow, so that concurrent
requests draft for each other.  Other verifiers' outputs come when their requests have ended.

Only requests of one tenant share outputs, and only requests that drafters may learn from.  Sharing changes no token.  A
request's speed, however, tells whether another request of its tenant got a similar answer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Sequence

from backend.speculation.texts import LookupSource
from backend.wire.engine import SHARED_SUFFIX

SIZES = (4, SHARED_SUFFIX)
"""Lengths in tokens of the suffixes that are looked up, the shortest first."""
KEPT = 1 << 17
"""Suffixes in an index, over all requests and sizes: about 20 MB.  The older half is dropped when it is full."""
SURE = 10
"""Agreeing tokens that count in a sign; more say nothing new."""

WAITING = KEPT // (2 * len(SIZES))
"""Most tokens of other verifiers' outputs that wait to be indexed; the oldest outputs make room."""

Place = tuple[list[int], int]
"""An output, and a position in it."""


class Index:
    """Positions in outputs, by the hash of the suffix before them and its tenant's salt."""

    def __init__(self) -> None:
        self._young: dict[int, Place] = {}
        self._old: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, suffix: int) -> Place | None:
        """The position after the latest occurrence of a suffix."""
        return self._young.get(suffix) or self._old.get(suffix)

    def add(self, suffix: int, place: Place) -> None:
        """Indexes a suffix that ends before `place`."""
        self._young[suffix] = place
        if len(self._young) >= KEPT // 2:
            self._old, self._young = self._young, {}


class SharedTexts:
    """The outputs of one verifier's requests, and those of requests that have ended at other verifiers.

    Each has an index of its own, because the others' outputs are more and would push out those of running requests.
    """

    def __init__(self) -> None:
        self._own, self._others = Index(), Index()
        self._secret = secrets.token_bytes(16)
        self._waiting: deque[tuple[SharedText, list[int]]] = deque()
        """Other verifiers' outputs: a view that adds to the index, and the text that it adds."""
        self._waiting_tokens = 0

    def reader(self, tenant: str, length: int) -> SharedText:
        """The view of a request that is `length` tokens long now.  Its further tokens are shared with its tenant's requests."""
        return SharedText(self, self._own, self._salt(tenant), length)

    def _salt(self, tenant: str) -> int:
        # The salt is secret: no tenant can construct a suffix whose hash is another tenant's.  It is computed and not kept,
        # because clients choose tenants' names (`cache_salt`), as many as they like.
        salt = hashlib.blake2b(tenant.encode(errors="surrogatepass"), key=self._secret, digest_size=8).digest()
        return int.from_bytes(salt, "big")

    def take(self, tenant: str, text: list[int], began: int) -> None:
        """Takes another verifier's output, `text` from position `began` on.  `advance` indexes it."""
        self._waiting.append((SharedText(self, self._others, self._salt(tenant), began), text))
        self._waiting_tokens += len(text)
        while self._waiting_tokens > WAITING:
            self._waiting_tokens -= len(self._waiting.popleft()[1])

    def advance(self, most: int) -> None:
        """Indexes up to `most` tokens of other verifiers' outputs."""
        while self._waiting and most > 0:
            view, text = self._waiting[0]
            most -= view.advance(text, most)
            if view.is_indexed(text):
                self._waiting.popleft()
                self._waiting_tokens -= len(text)

    def find(self, suffix: int) -> Place | None:
        """The position after the latest occurrence of a suffix here, else at another verifier."""
        return self._own.find(suffix) or self._others.find(suffix)


class SharedText(LookupSource):
    """One request's view of the outputs; its own tokens go into `index`."""

    kind = "shared"

    def __init__(self, texts: SharedTexts, index: Index, salt: int, length: int) -> None:
        super().__init__()
        self._texts, self._index, self._salt = texts, index, salt
        self._output: list[int] = []
        """The request's own tokens that are indexed."""
        self._shared = self._read = length
        """The length up to which the request's text is indexed, and up to which it was compared with the other output."""
        self._at: Place | None = None
        """The position in another output that the request's next token is compared with."""
        self._agreed = 0

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """As in `LookupSource`."""
        self._follow(text)
        if self._at is None:
            return [], []
        output, at = self._at
        tokens = output[at : at + k]
        return tokens, self._signs(min(self._agreed, SURE), len(tokens))

    def advance(self, text: Sequence[int], most: int) -> int:
        """As in `LookupSource`."""
        end = min(len(text), self._shared + most)
        for place in range(self._shared, end):
            self._output.append(text[place])
            for size in SIZES:
                if place >= size:
                    self._index.add(hash((self._salt, *text[place - size : place])), (self._output, len(self._output) - 1))
        advanced, self._shared = end - self._shared, end
        return advanced

    def is_indexed(self, text: Sequence[int]) -> bool:
        """Whether all of the request's `text` is in the index."""
        return self._shared == len(text)

    def _follow(self, text: Sequence[int]) -> None:
        """Compares new tokens with the other output; looks the suffix up anew where that output ends or differs."""
        if self._at is not None:
            output, at = self._at
            while self._read < len(text) and at < len(output) and output[at] == text[self._read]:
                at, self._read, self._agreed = at + 1, self._read + 1, self._agreed + 1
            self._at = (output, at) if self._read == len(text) and at < len(output) else None
        if self._at is None:
            self._read = len(text)
            for size in SIZES:
                # What follows a longer suffix is preferred; a suffix that is not found is no part of a longer one that is.
                found = self._texts.find(hash((self._salt, *text[-size:]))) if len(text) >= size else None
                if found is None:
                    return
                if found[0] is not self._output:
                    self._at, self._agreed = found, size
