"""Drafts without a drafter: prompt lookup in every request's own text, on the verifier.  Pure; scheduler's process and thread.

`advance` indexes a request's new tokens, a bounded number per step.  The next step does not need the result, so it can
run while the device computes.  `propose` only looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.speculation.calibration import log_odds
from backend.speculation.lookup import LONGEST, SHORTEST, Lookup

WINDOW = 4096
"""Only the last 4096 tokens of a prompt are indexed: bounds the memory of a request to about a megabyte."""
INDEXED_PER_STEP = 512
"""Tokens indexed per step over all requests, so that a batch of long prompts does not stop the engine."""
FORGET = 0.9
"""Weight of a look-up's score after each newer look-up: text may begin or cease to repeat itself within a sentence."""


@dataclass
class _Own:
    lookup: Lookup
    right: float = 0.0
    wrong: float = 0.0
    """Decayed counts of tokens that its look-ups had right and wrong."""


class Lookups:
    """Prompt lookup for all requests of one verifier."""

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}
        self._budget = INDEXED_PER_STEP

    def begin_step(self) -> None:
        """A step begins: renews the number of tokens that may be indexed."""
        self._budget = INDEXED_PER_STEP

    def advance(self, request_id: str, text: Sequence[int]) -> None:
        """Indexes the request's new tokens.  `text`: all its tokens, prompt included; they only ever grow."""
        own = self._own.get(request_id)
        if own is None:
            known = list(text)
            own = self._own[request_id] = _Own(Lookup(known, SHORTEST, LONGEST, max(len(known) - WINDOW, 0)))
        elif len(text) > len(own.lookup.tokens):
            own.lookup.tokens.extend(text[len(own.lookup.tokens) :])
        if self._budget > 0:
            self._budget -= own.lookup.index(self._budget)

    def propose(self, request_id: str, text: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """A draft of at most `k` tokens to follow `text` (all the request's tokens), and its signs; empty if none is found.

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
        """Takes the result of comparing a look-up of this request with the text (`guesses.Resolved`)."""
        own = self._own.get(request_id)
        if own is not None:
            own.right = FORGET * own.right + matched
            own.wrong = FORGET * own.wrong + seen - matched

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
