"""The fleet as its page shows it: the document that `/fleet/events` sends.  Pure data.

Shares and acceptance lengths are ratios of summed differences of counters, as `docs/metrics.md` defines them, never averages
of ratios.  What cannot be said (no work, no drafts in the window) is None.
"""

from __future__ import annotations

import msgspec

from backend.fleet import MemberState
from gateway.fleet_log import LogEntry


class VerifierRow(msgspec.Struct):
    """One verifier."""

    id: str
    node: str
    model: str
    state: MemberState
    connected: bool
    heard_s: float
    mode: str | None = None
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    plan_k: int = 0
    plan_outcomes: int = 0
    plan_changes: int = 0
    tokens_per_s: float | None = None
    tgs: float | None = None
    """Tokens per second of one running sequence: tokens emitted / (running sequences x time)."""
    acceptance_length: float | None = None
    busy: float | None = None
    """Share of the time, like the values of `idle`; they add up to 1."""
    idle: dict[str, float] = msgspec.field(default_factory=dict)


class DrafterRow(msgspec.Struct):
    """One drafter."""

    id: str
    node: str
    model: str
    state: MemberState
    heard_s: float
    verifiers: list[str]
    sequences: int = 0
    cache_usage: float = 0.0
    busy: float | None = None
    draft_tokens_per_s: float | None = None
    version: int | None = None
    """Of a head that learns; None: it does not."""


class PairRow(msgspec.Struct):
    """What a verifier sees of a drafter bound to it, or of one whose drafts it verified within the window."""

    verifier: str
    drafter: str
    bound: bool
    down: bool
    """The verifier does not wait for it: its circuit breaker is open."""
    acceptance_length: float | None = None
    drafts_per_s: float = 0.0
    round_trip_ms: float | None = None
    dropped_per_s: float = 0.0


class Totals(msgspec.Struct):
    """The fleet as a whole; ratios of sums over its verifiers."""

    members: dict[str, dict[str, int]]
    """By kind, then state."""
    running: int
    waiting: int
    in_flight: int
    kv_usage: float
    """Of the fullest verifier."""
    tokens_per_s: float
    tgs: float | None
    acceptance_length: float | None
    busy: float | None
    idle: dict[str, float]


class FleetView(msgspec.Struct):
    """One event of `/fleet/events`."""

    at: float
    """Unix seconds."""
    window_s: float
    version: int
    snapshot_age_s: float | None
    """Seconds since the directory answered; None when it never has."""
    totals: Totals
    verifiers: list[VerifierRow]
    drafters: list[DrafterRow]
    pairs: list[PairRow]
    counters: dict[str, int]
    """The coordinator's own."""
    moved: dict[str, int]
    """Sequences of this gateway that went on at another verifier: `failover`, `migration`."""
    log: list[LogEntry]
    """What happened to members, assignments and sequences, the latest first."""
    plans: list[LogEntry]
    """How `auto` has changed its plan, the latest first."""
