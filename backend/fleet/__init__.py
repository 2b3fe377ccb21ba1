"""Who is in the fleet and what members tell each other.  Pure data and `speed.py`, in any process."""

from backend.fleet.members import (
    Assignment,
    DrafterRef,
    Draining,
    FleetSnapshot,
    Member,
    MemberKind,
    MemberState,
    MemberView,
    Operation,
    OperationKind,
    OperationState,
    Orders,
    reached_at,
)
from backend.fleet.stats import CHANCE_BINS, IDLE_CAUSES, LOOKUP, DraftCounters, DrafterStats, Foretold, VerifierStats

__all__ = [
    "CHANCE_BINS",
    "IDLE_CAUSES",
    "LOOKUP",
    "Assignment",
    "DraftCounters",
    "DrafterRef",
    "DrafterStats",
    "Draining",
    "FleetSnapshot",
    "Foretold",
    "Member",
    "MemberKind",
    "MemberState",
    "MemberView",
    "Operation",
    "OperationKind",
    "OperationState",
    "Orders",
    "VerifierStats",
    "reached_at",
]
