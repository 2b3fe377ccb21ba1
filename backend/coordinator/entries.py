"""The coordinator's registry entry for a member, and the registry's counters.  Pure; owned by `policy.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from backend.coordinator.rates import VerifierRates
from backend.fleet import DrafterStats, Draining, Member, MemberState, MemberView, VerifierStats
from backend.fleet.speed import Speed


@dataclass
class FleetCounters:
    """The registry's counters; `FleetSnapshot.counters` explains each."""

    registrations: int = 0
    restarts: int = 0
    leases_expired: int = 0
    assignments_made: int = 0
    assignments_dropped: int = 0
    reassignments: int = 0
    decisions: int = 0


@dataclass
class MemberEntry:
    """One process; a restarted member gets a new entry."""

    member: Member
    heard: float
    state: MemberState
    drain: bool = False
    migrate_at: float | None = None
    """When to move the requests of a draining verifier elsewhere; None: never."""
    seen_version: int = 0
    verifier: VerifierStats | None = None
    drafter: DrafterStats | None = None
    rates: VerifierRates = field(default_factory=VerifierRates)
    """Verifiers only."""

    @property
    def is_fit(self) -> bool:
        """Whether the member may be part of an assignment."""
        return self.state == "ready" and not self.drain

    @property
    def speed(self) -> Speed | None:
        """The measured speed of a drafter's rounds."""
        return self.drafter.speed if self.drafter is not None else None

    def view(self, now: float) -> MemberView:
        state = "draining" if self.state == "ready" and self.drain else self.state
        shown = msgspec.structs.replace(self.member, state=state)
        heard = max(0.0, now - self.heard)
        return MemberView(shown, heard, self.verifier, self.drafter, self._drain(now), self.seen_version)

    def _drain(self, now: float) -> Draining | None:
        if self.drain:
            left_s = None if self.migrate_at is None else max(0.0, self.migrate_at - now)
            return Draining(left_s == 0, deadline_s=left_s)
        # A member that reports itself as draining, without an order, is about to be ended from outside.
        return Draining(migrate=True, ordered=False) if self.state == "draining" else None
