"""Drafts without a drafter: prompt lookup on the verifier, in every request's own text.  Pure; scheduler's process and thread.

A request's tokens are made findable as they come, a bounded number per step; that is not needed for the next launch and can be
done while the device computes.  `propose` itself only looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.speculation.calibration import log_odds
from backend.speculation.lookup import LONGEST, SHORTEST, Lookup

WINDOW = 4096
"""Tokens of a prompt that can be found, the latest: bounds the memory of a request to about a megabyte."""
INDEXED_PER_STEP = 512
"""Tokens made findable per step over all requests, so that a batch of long prompts does not stop the engine."""
FORGET = 0.9
"""Weight of a look-up after one newer one: text turns from copying to not copying within sentences."""


@dataclass
class _Own:
    lookup: Lookup
    right: float = 0.0
    wrong: float = 0.0
    """Tokens of its look-ups that were right and wrong, decayed."""


class Lookups:
    """All requests of one verifier."""

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}
        self._budget = INDEXED_PER_STEP

    def begin_step(self) -> None:
        """A step begins."""
        self._budget = INDEXED_PER_STEP

    def advance(self, request_id: str, text: Sequence[int]) -> None:
        """Makes the request's tokens findable; `text`: all of them, prompt included.  They only ever grow."""
        own = self._own.get(request_id)
        if own is None:
            known = list(text)
            own = self._own[request_id] = _Own(Lookup(known, SHORTEST, LONGEST, max(len(known) - WINDOW, 0)))
        elif len(text) > len(own.lookup.tokens):
            own.lookup.tokens.extend(text[len(own.lookup.tokens) :])
        if self._budget > 0:
            self._budget -= own.lookup.index(self._budget)

    def propose(self, request_id: str, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """At most `k` tokens to follow `text`, all of the request's tokens, and their signs; nothing where none is found.

        Signs per token: the log-odds of the request's recent look-ups, and how much longer than usual the suffix is.
        """
        own = self._own.get(request_id)
        if own is None:
            return [], []
        lookup = own.lookup
        if len(text) > len(lookup.tokens):
            lookup.tokens.extend(text[len(lookup.tokens) :])
        tokens = lookup.look_up([], k)
        return tokens, [log_odds(own.right, own.wrong), lookup.found - 3.0] * len(tokens)

    def scored(self, request_id: str, matched: int, seen: int) -> None:
        """A look-up of this request was compared with what followed (`guesses.Resolved`)."""
        own = self._own.get(request_id)
        if own is not None:
            own.right = FORGET * own.right + matched
            own.wrong = FORGET * own.wrong + seen - matched

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._own.pop(request_id, None)
