"""What the assignment of drafters to verifiers depends on.  Pure data.

A binding says that a drafter serves a verifier.  Both may have several: a verifier's requests are split evenly over its
drafters (`backend/speculation/pairing.py`), and a drafter takes the rounds of all its verifiers in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backend.fleet.speed import Speed

Pair = tuple[str, str]
"""(verifier, drafter)."""


@dataclass
class VerifierLoad:
    """One verifier as the rule sees it.  A time or length of 0 was not measured yet."""

    requests: float = 0.0
    """Requests in a step, or waiting if none runs; a short-term average."""
    plain_s: float = 0.0
    """Seconds of a step over the present requests without drafts."""
    drafted_s: float = 0.0
    """Seconds of a step over the present requests with drafts of the length that it has asked for lately."""
    length: float = 0.0
    """Acceptance length of such drafts."""
    overlap: float = 0.0
    """Share of drafting that happens while the verifier computes.  0: it drafts, then verifies; 1: both at once."""
    may_skip: bool = True
    """Whether it stops drafting if plain steps are faster (mode `auto`)."""
    bare_s: float = 0.0
    """Seconds per token of each request without a drafter: of plain steps, or of steps with look-ups if these are faster."""
    down: frozenset[str] = frozenset()
    """Drafters whose circuit breaker is open here: the verifier does not wait for them."""


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on.  `verifiers` and `drafters` are the fit ones, by id and in the order of ids."""

    now: float
    verifiers: Mapping[str, VerifierLoad]
    drafters: Mapping[str, Speed | None]
    """The measured speed of each drafter's rounds; None: not measured yet."""
    bindings: Mapping[Pair, float] = field(default_factory=dict)
    """Pair -> since when it is bound.  Its members need not be fit any more."""
    pins: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Drafter -> the only verifiers that it serves, as far as they are fit.  An empty list keeps it out of service."""
