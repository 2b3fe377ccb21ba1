"""The interface between the protocol (`service.py`) and the ways to propose: what every kind of drafter can do.  Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from backend.noise import to_int64
from backend.speculation.chances import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from backend.wire.drafting import Outcome, TargetTensor

MAX_DRAFT = 64
"""Longest draft, even if a verifier asks for more tokens."""
MAX_OUTCOMES = 64
"""Most outcomes enumerated per request, even if a verifier asks for more."""


COOLEST = 1e-5
"""Below this temperature vLLM samples greedily (`vllm/sampling_params.py`)."""


@dataclass(frozen=True)
class Sampling:
    """How the verifier chooses a request's tokens."""

    seed: int
    """The unsigned 64-bit seed, read as int64."""
    temperature: float
    """0: greedy."""
    independent: bool = False
    """Draft tokens are samples, drawn with noise of the drafter's own: the verifier judges them by rejection sampling."""
    top_k: int = 0
    """Not positive: all.  Only for independent drafts, as are the next two."""
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(
        cls, seed: int, temperature: float, independent: bool = False, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> Sampling:
        """From an unsigned seed.  A greedy request is never independent."""
        if temperature < COOLEST:
            return cls(to_int64(seed), 0.0)
        return cls(to_int64(seed), temperature, independent, top_k, top_p, min_p)

    @property
    def rule(self) -> Rule:
        """How the verifier judges the request's drafts."""
        if self.temperature == 0:
            return Rule.GREEDY
        return Rule.INDEPENDENT if self.independent else Rule.SHARED


GREEDY = Sampling(0, 0.0)


@dataclass(frozen=True)
class Until:
    """When a draft ends: after `k` tokens, or before the first whose survival falls below `floor`.

    `chance_weights`: the weights (`chances.py`) for requests of each `Rule`.  Empty: `floor` has no effect.
    """

    k: int
    floor: float = 0.0
    chance_weights: Sequence[Sequence[float]] = ()

    def judge(self, sampling: Sampling) -> Sequence[float] | None:
        """The weights for a request with this sampling; None if it has none."""
        return self.chance_weights[sampling.rule] if self.chance_weights else None


class Drafted(NamedTuple):
    """A draft.  `signs`: value and lead of each token; empty: unknown.

    `first`: its first token, even if that was too unlikely to be sent; empty: unknown.  `proposal`: see `wire/drafting.py`.
    """

    tokens: list[int]
    signs: list[float]
    first: Sequence[int] = ()
    proposal: bytes = b""


NOTHING = Drafted([], [])


@dataclass(frozen=True)
class DraftRequest:
    """One request's share of a batch: extend its cache by true features, then draft.  `until.k` = 0: do not draft.

    `features` is `[rows, hidden]` on the CPU: the features of positions `base_len - 1 - rows .. base_len - 2`.  None if the
    proposer takes no features.
    """

    key: Hashable
    base_len: int
    rows: int
    features: Tensor | None
    until: Until = Until(0)


@dataclass(frozen=True)
class Premise:
    """One request's share of an enumeration: how the verification of `verifying`, behind `base_len` tokens, may end."""

    key: Hashable
    base_len: int
    until: Until
    verifying: list[int]
    outcomes: int


@dataclass(frozen=True)
class ProposerStats:
    """A proposer's present load and cumulative counters."""

    sequences: int = 0
    cache_usage: float = 0.0
    evictions: int = 0


class Proposer(Protocol):
    """Drafts for requests, which it knows by key.  Called by one thread."""

    hidden: int
    """Width of a feature row; 0: takes no features."""
    vocab_size: int
    max_position: int
    borrowed: frozenset[TargetTensor]
    """The target's tensors that it drafts with."""

    def open(self, key: Hashable, tokens: list[int], rows: int, sampling: Sampling = GREEDY) -> None:
        """Starts a request, or starts it again, with all its tokens.  Features of the last `rows` positions will follow."""

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int) -> bool:
        """Takes a request's newest tokens, `tokens[-1]` at `base_len - 1`.  False when the request is unknown."""

    def close(self, key: Hashable) -> None:
        """The request is over."""

    def draft(self, batch: Sequence[DraftRequest]) -> list[Drafted]:
        """The draft for each of the batch's (distinct, open) requests, in order.

        An ask without rows drafts from the state that the previous ask left, if the request's length has not changed.
        """

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        """For each (distinct) request, in order, at most `outcomes` outcomes with their drafts.  Changes no request."""

    def length(self, key: Hashable) -> int | None:
        """Tokens of an open request, as far as known here; None: no such request."""

    def invalidate(self) -> None:
        """The target's weights were exchanged: rows made from the old weights must not serve new requests."""

    def usage(self) -> ProposerStats:
        """Counters and load."""
