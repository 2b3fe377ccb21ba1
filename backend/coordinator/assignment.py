"""What the assignment rule is asked and answers: a `Situation` in, changes of bindings out.  Pure.

A binding says that a drafter serves a verifier.  Both ends may have several: a verifier's requests are split evenly over its
drafters (`backend/speculation/pairing.py`), a drafter takes the rounds of all its verifiers in turn.  Pins and members that
left are respected here, whatever the rule (`water_filling.py`).
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
    """Running and waiting, averaged over a moment; what matters is how many a step holds."""
    plain_s: float | None = None
    """A step over the present requests without drafts."""
    drafted_s: float | None = None
    """A step over the present requests with as many draft tokens each as it has asked for of late."""
    length: float | None = None
    """Acceptance length with so many draft tokens."""
    overlap: float = 0.0
    """Share of drafting that goes on while the verifier computes: 0 draft, then verify; 1 both at once."""
    may_skip: bool = True
    """Drafts nothing where that is faster (mode `auto`)."""
    bare_s: float | None = None
    """Seconds per token of each request while nobody drafts for it: plain steps, or what its prompt lookups make of them."""


@dataclass
class DrafterSpeed:
    """One drafter as a policy sees it.  None: not measured yet."""

    id: str
    fixed_s: float | None = None
    """Time of a round whatever its size."""
    per_request_s: float | None = None
    """Further time per request in it."""
    down_for: frozenset[str] = frozenset()
    """Verifiers whose circuit breaker for it is open: they do not wait for it."""

    def set_down(self, verifier_id: str, is_down: bool) -> None:
        """What a verifier's circuit breaker says of it."""
        if (verifier_id in self.down_for) != is_down:
            self.down_for ^= {verifier_id}


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on.  `verifiers` and `drafters` are those fit to work, in the order of their ids."""

    now: float
    verifiers: Sequence[VerifierLoad]
    drafters: Sequence[DrafterSpeed]
    bindings: Mapping[Pair, float] = field(default_factory=dict)
    """Since when, by pair; the ends need not be fit any more."""
    pins: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By drafter: it serves those of these verifiers that are fit, and nobody else.  An empty list keeps it out of service."""


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
    """A rule for who drafts for whom.  A function of the situation alone: deciding changes nothing."""

    def decide(self, situation: Situation) -> list[Action]:
        """What to change, `Unbind`s first.

        Pairs that are not fit or contradict a pin go, free drafters are bound, and what is uneven may be evened out.
        """
        ...


class Bindings:
    """A draft of the assignment: starts as it is now, without what cannot stay, and ends as the decision.

    `since` of a pair bound here is None: it was not there before.
    """

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
        """Adds a pair."""
        self.of_verifier[verifier].add(drafter)
        self.of_drafter[drafter].add(verifier)

    def unbind(self, verifier: str, drafter: str) -> None:
        """Takes a pair away."""
        self.of_verifier[verifier].discard(drafter)
        self.of_drafter[drafter].discard(verifier)

    def since(self, verifier: str, drafter: str) -> float | None:
        """Since when a pair is bound; None: only in this draft."""
        return self._before.get((verifier, drafter))

    def free(self) -> list[str]:
        """Drafters that serve nobody and are not told to, by id."""
        return sorted(each for each, serves in self.of_drafter.items() if not serves and each not in self.pins)

    def bare(self) -> list[str]:
        """Verifiers that nobody drafts for, by id."""
        return sorted(each for each, served in self.of_verifier.items() if not served)

    def actions(self) -> list[Action]:
        """What leads from the situation to this draft, in a stable order."""
        after = {(verifier, drafter) for verifier, served in self.of_verifier.items() for drafter in served}
        gone, new = sorted(self._before.keys() - after), sorted(after - self._before.keys())
        return [*(Unbind(*pair) for pair in gone), *(Bind(*pair) for pair in new)]
