"""The document that `/fleet/events` sends to the fleet page.  Pure data.

Shares and acceptance lengths are ratios of summed differences of counters, as `docs/metrics.md` defines them, never averages
of ratios.  Undefined values (no work or no drafts in the window) are None.
"""

from __future__ import annotations

import msgspec

from backend.fleet import MemberState
from gateway.fleet_log import LogEntry


class VerifierRow(msgspec.Struct):
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
    """Share of time; together with the values of `idle`, 1."""
    idle: dict[str, float] = msgspec.field(default_factory=dict)


class DrafterRow(msgspec.Struct):
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
    """Version of a head that learns; None: it does not learn."""
    live_acceptance: float | None = None
    """Share of drafts of a head that learns whose first token was right, lately."""
    previous_version: int | None = None
    """The version that the present one is compared with."""
    previous_acceptance: float | None = None


class PairRow(msgspec.Struct):
    """A verifier and a drafter that is assigned to it, or whose drafts it verified within the window."""

    verifier: str
    drafter: str
    bound: bool
    down: bool
    """The drafter's circuit breaker is open, so the verifier does not wait for its drafts."""
    acceptance_length: float | None = None
    drafts_per_s: float = 0.0
    round_trip_ms: float | None = None
    dropped_per_s: float = 0.0


class Totals(msgspec.Struct):
    """Values of the whole fleet; ratios are those of sums over its verifiers."""

    members: dict[str, dict[str, int]]
    """Number of members, by kind, then state."""
    running: int
    waiting: int
    in_flight: int
    kv_usage: float
    """KV cache usage of the fullest verifier."""
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
    """Seconds since the directory last answered; None: it never has."""
    totals: Totals
    verifiers: list[VerifierRow]
    drafters: list[DrafterRow]
    pairs: list[PairRow]
    counters: dict[str, int]
    """The coordinator's counters."""
    moved: dict[str, int]
    """This gateway's sequences that went on at another verifier, by `failover` and `migration`."""
    log: list[LogEntry]
    """Events of members, assignments and sequences, the latest first."""
    plans: list[LogEntry]
    """Changes of plan by mode `auto`, the latest first."""
