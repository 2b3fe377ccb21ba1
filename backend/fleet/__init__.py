"""Data about the fleet: members, assignments, orders, counters, and the measured speed of steps.  Pure, in any process."""

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
from backend.fleet.metric import Metric, metrics_of
from backend.fleet.stats import IDLE_CAUSES, LOOKUP, VERSIONS, DraftCounters, DrafterStats, Learning, Verified, VerifierStats
