"""What every kind of drafter can do: the seam between the protocol (`service.py`) and the ways to propose.  Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_DRAFT = 64
"""No draft is longer, whatever was asked for."""


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

    def open(self, key: Hashable, tokens: list[int], rows: int, now: float) -> None:
        """Starts a request (again) with all its tokens; features of the last `rows` positions are about to come."""

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int, now: float) -> bool:
        """The newest tokens, `tokens[-1]` at `base_len - 1`; False when the request is unknown."""

    def close(self, key: Hashable) -> None:
        """The request is over."""

    def draft(self, batch: Sequence[Ask]) -> list[list[int]]:
        """Up to `k` tokens for each of the batch's (distinct, open) requests, in order."""

    def requests(self) -> list[Hashable]:
        """Open requests."""

    def close_idle(self, before: float) -> None:
        """Ends requests unheard of since `before`."""

    def usage(self) -> Usage:
        """Counters and load."""
