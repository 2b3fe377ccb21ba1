"""What every kind of drafter can do: the seam between the protocol (`service.py`) and the ways to propose.  Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from backend.protocol import Outcome

MAX_DRAFT = 64
"""No draft is longer, whatever was asked for."""
MAX_OUTCOMES = 64
"""No more outcomes are enumerated for a request, whatever was asked for."""


@dataclass(frozen=True)
class Ask:
    """One request's share of a batch: extend it by true features, then draft `k` tokens.

    `features` is `[rows, hidden]` on the CPU: the features of positions `base_len - 1 - rows .. base_len - 2`; None where the
    proposer takes none.
    """

    key: Hashable
    base_len: int
    rows: int
    k: int
    features: Tensor | None


@dataclass(frozen=True)
class Premise:
    """One request's share of an enumeration: `verifying` is being verified at `base_len`, draft for how that may end."""

    key: Hashable
    base_len: int
    k: int
    verifying: list[int]
    outcomes: int


@dataclass(frozen=True)
class Usage:
    """A proposer's present load and cumulative counters."""

    sequences: int = 0
    cache_usage: float = 0.0
    prefix_rows_reused: int = 0
    evictions: int = 0


class Proposer(Protocol):
    """Knows requests by key.  Called by one thread; `now` is seconds of any monotonic clock."""

    kind: str
    hidden: int
    """Width of a feature row; 0: takes none."""
    vocab_size: int
    max_position: int
    batch_outcomes: int
    """How many outcomes to enumerate in one go at most: more keep whoever waits for a fresh draft waiting."""

    def open(self, key: Hashable, tokens: list[int], rows: int, now: float) -> None:
        """Starts a request (again) with all its tokens; features of the last `rows` positions are about to come."""

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int, now: float) -> bool:
        """The newest tokens, `tokens[-1]` at `base_len - 1`; False when the request is unknown."""

    def close(self, key: Hashable) -> None:
        """The request is over."""

    def draft(self, batch: Sequence[Ask]) -> list[list[int]]:
        """Up to `k` tokens for each of the batch's (distinct, open) requests, in order.

        An ask without rows is answered from what the last one left, if the request is still as long as it was then.
        """

    def imagine(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        """At most `outcomes` outcomes with drafts of up to `k` tokens per (distinct) request, in order; changes nothing."""

    def length(self, key: Hashable) -> int | None:
        """Tokens an open request is known to have."""

    def requests(self) -> list[Hashable]:
        """Open requests."""

    def close_idle(self, before: float) -> None:
        """Ends requests unheard of since `before`."""

    def invalidate(self) -> None:
        """What was kept of ended requests fits the target no longer: its weights were exchanged."""

    def usage(self) -> Usage:
        """Counters and load."""
