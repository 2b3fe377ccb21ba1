"""What every kind of drafter can do: the seam between the protocol (`service.py`) and the ways to propose.  Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from backend.noise import to_int64

if TYPE_CHECKING:
    from torch import Tensor

    from backend.wire.drafting import Outcome

MAX_DRAFT = 64
"""No draft is longer, whatever was asked for."""
MAX_OUTCOMES = 64
"""No more outcomes are enumerated for a request, whatever was asked for."""


COOLEST = 1e-5
"""Below this temperature vLLM samples greedily (`vllm/sampling_params.py`)."""


@dataclass(frozen=True)
class Sampling:
    """How the verifier chooses a request's tokens."""

    seed: int
    """As the int64 of the same bits."""
    temperature: float
    """0: greedy."""

    @classmethod
    def of(cls, seed: int, temperature: float) -> Sampling:
        """From an unsigned seed."""
        return cls(to_int64(seed), temperature if temperature >= COOLEST else 0.0)


GREEDY = Sampling(0, 0.0)


@dataclass(frozen=True)
class Until:
    """When a draft ends: after `k` tokens, or before the first whose survival by `judges` falls below `floor`.

    `judges` are the weights of `chances` for greedy and for sampled requests, or none.
    """

    k: int
    floor: float = 0.0
    judges: Sequence[Sequence[float]] = ()

    def judge(self, sampling: Sampling) -> Sequence[float] | None:
        """The weights that hold for a request."""
        return self.judges[sampling.temperature > 0] if self.judges else None


class Drafted(NamedTuple):
    """A draft, with value and lead of each token, or without any of these.

    `first`: the token it would begin with, also where that was too unlikely to be sent; empty: not known.
    """

    tokens: list[int]
    signs: list[float]
    first: Sequence[int] = ()


NOTHING = Drafted([], [])


@dataclass(frozen=True)
class Ask:
    """One request's share of a batch: extend it by true features, then draft; `until.k` is 0 where no draft is wanted.

    `features` is `[rows, hidden]` on the CPU: the features of positions `base_len - 1 - rows .. base_len - 2`; None where the
    proposer takes none.
    """

    key: Hashable
    base_len: int
    rows: int
    features: Tensor | None
    until: Until = Until(0)


@dataclass(frozen=True)
class Premise:
    """One request's share of an enumeration: `verifying` is being verified at `base_len`, draft for how that may end."""

    key: Hashable
    base_len: int
    until: Until
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

    def open(self, key: Hashable, tokens: list[int], rows: int, now: float, sampling: Sampling = GREEDY) -> None:
        """Starts a request (again) with all its tokens; features of the last `rows` positions are about to come."""

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int, now: float) -> bool:
        """The newest tokens, `tokens[-1]` at `base_len - 1`; False when the request is unknown."""

    def close(self, key: Hashable) -> None:
        """The request is over."""

    def draft(self, batch: Sequence[Ask]) -> list[Drafted]:
        """The draft for each of the batch's (distinct, open) requests, in order.

        An ask without rows is answered from what the last one left, if the request is still as long as it was then.
        """

    def imagine(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        """At most `outcomes` outcomes with their drafts per (distinct) request, in order; changes nothing."""

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
