"""The interface of assignment rules: a `Situation` in, changes of bindings out.  Pure.

A binding says that a drafter serves a verifier.  Both may have several: a verifier's requests are split evenly over its
drafters (`backend/speculation/pairing.py`), and a drafter takes the rounds of all its verifiers in turn.  `Bindings` applies
pins and drops members that left, so a rule (`water_filling.py`) need not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Pair = tuple[str, str]
"""(verifier, drafter)."""


@dataclass
class VerifierLoad:
    """One verifier as a policy sees it.  None: not measured yet."""

    id: str
    requests: float = 0.0
    """Requests in a step, or waiting if none runs; a short-term average."""
    plain_s: float | None = None
    """Seconds of a step over the present requests without drafts."""
    drafted_s: float | None = None
    """Seconds of a step over the present requests with drafts of the length that it has asked for lately."""
    length: float | None = None
    """Acceptance length of such drafts."""
    overlap: float = 0.0
    """Share of drafting that happens while the verifier computes.  0: it drafts, then verifies; 1: both at once."""
    may_skip: bool = True
    """Whether it stops drafting if plain steps are faster (mode `auto`)."""
    bare_s: float | None = None
    """Seconds per token of each request without a drafter: of plain steps, or of steps with look-ups if these are faster."""


@dataclass
class DrafterSpeed:
    """One drafter as a policy sees it.  None: not measured yet."""

    id: str
    fixed_s: float | None = None
    """Seconds of a round, apart from its requests."""
    per_request_s: float | None = None
    """Further seconds per request in a round."""
    down_for: frozenset[str] = frozenset()
    """Verifiers whose circuit breaker for this drafter is open: they do not wait for it."""

    def set_down(self, verifier_id: str, is_down: bool) -> None:
        """Notes whether a verifier's circuit breaker for this drafter is open."""
        if (verifier_id in self.down_for) != is_down:
            self.down_for ^= {verifier_id}


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on.  `verifiers` and `drafters` are the fit ones, sorted by id."""

    now: float
    verifiers: Sequence[VerifierLoad]
    drafters: Sequence[DrafterSpeed]
    bindings: Mapping[Pair, float] = field(default_factory=dict)
    """Pair -> since when it is bound.  Its members need not be fit any more."""
    pins: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Drafter -> the only verifiers that it serves, as far as they are fit.  An empty list keeps it out of service."""


@dataclass(frozen=True)
class Bind:
    """`drafter` begins to serve `verifier`."""

    verifier: str
    drafter: str


@dataclass(frozen=True)
class Unbind:
    """`drafter` ceases to serve `verifier`."""

    verifier: str
    drafter: str


Action = Bind | Unbind


class AssignmentPolicy(Protocol):
    """A rule that assigns drafters to verifiers.  A function of the situation alone, without state of its own."""

    def decide(self, situation: Situation) -> list[Action]:
        """The changes to make, `Unbind`s first.

        Unbinds pairs that are not fit or contradict a pin, binds free drafters, and may move drafters or even out sharing.
        """
        ...


class Bindings:
    """The assignment while a rule works on it: first the present pairs that are fit and contradict no pin, and pinned ones."""

    def __init__(self, situation: Situation) -> None:
        verifiers = {each.id for each in situation.verifiers}
        drafters = {each.id for each in situation.drafters}
        self._before = situation.bindings
        self.pins = situation.pins
        self.of_verifier: dict[str, set[str]] = {each: set() for each in verifiers}
        self.of_drafter: dict[str, set[str]] = {each: set() for each in drafters}
        for verifier, drafter in situation.bindings:
            pinned = situation.pins.get(drafter)
            if verifier in verifiers and drafter in drafters and (pinned is None or verifier in pinned):
                self.bind(verifier, drafter)
        for drafter, wanted in situation.pins.items():
            if drafter in drafters:
                for verifier in wanted:
                    if verifier in verifiers:
                        self.bind(verifier, drafter)

    def bind(self, verifier: str, drafter: str) -> None:
        self.of_verifier[verifier].add(drafter)
        self.of_drafter[drafter].add(verifier)

    def unbind(self, verifier: str, drafter: str) -> None:
        self.of_verifier[verifier].discard(drafter)
        self.of_drafter[drafter].discard(verifier)

    def since(self, verifier: str, drafter: str) -> float | None:
        """Since when a pair is bound; None: it is new."""
        return self._before.get((verifier, drafter))

    def free(self) -> list[str]:
        """Drafters without a verifier that are not pinned, sorted."""
        return sorted(each for each, serves in self.of_drafter.items() if not serves and each not in self.pins)

    def bare(self) -> list[str]:
        """Verifiers without a drafter, sorted."""
        return sorted(each for each, served in self.of_verifier.items() if not served)

    def actions(self) -> list[Action]:
        """The changes that lead from the situation to these bindings, in a stable order."""
        after = {(verifier, drafter) for verifier, served in self.of_verifier.items() for drafter in served}
        gone, new = sorted(self._before.keys() - after), sorted(after - self._before.keys())
        return [*(Unbind(*pair) for pair in gone), *(Bind(*pair) for pair in new)]
