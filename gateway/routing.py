"""Which verifier takes a request.  Pure: candidates in, an id out; no clock, no socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """A verifier that may be given work, as this gateway sees it."""

    id: str
    tokens: int
    """Tokens of this gateway's requests there: prompts and what they have emitted."""
    requests: int
    routed: int
    """Requests this gateway has ever sent there."""


class Router(Protocol):
    """Chooses among the verifiers that are ready."""

    def choose(self, request_tokens: int, candidates: Sequence[Candidate]) -> str | None:
        """The id of one of `candidates`, or None when there is none."""
        ...


class LeastLoaded:
    """The verifier with the fewest tokens in flight; ties go to fewer requests, then to the one used least so far."""

    def choose(self, request_tokens: int, candidates: Sequence[Candidate]) -> str | None:
        del request_tokens
        if not candidates:
            return None
        return min(candidates, key=lambda each: (each.tokens, each.requests, each.routed, each.id)).id
