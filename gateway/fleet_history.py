"""Computes the fleet page's rates and shares from the members' reports: differences of counters over the last seconds.

Pure: takes an `Observation` (with its time), gives a `FleetView`.  `FleetHistory` owns the reports of the last `WINDOW_S`
seconds, and the log of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from backend.fleet import DraftCounters, DrafterStats, FleetSnapshot, MemberView, VerifierStats
from gateway.fleet_log import FleetLog
from gateway.fleet_view import DrafterRow, FleetView, PairRow, Totals, VerifierRow

if TYPE_CHECKING:
    from gateway.in_flight import MoveKind

WINDOW_S = 10.0
"""Seconds over which rates, shares and acceptance lengths are computed."""

_COPIED = ("mode", "running", "waiting", "plan_k", "plan_outcomes", "plan_changes")


class _Report(Protocol):
    started_at: float


R = TypeVar("R", bound=_Report)


@dataclass(frozen=True)
class Observation:
    """What the gateway knows about the fleet at one moment."""

    now: float
    """Monotonic seconds."""
    unix: float
    snapshot: FleetSnapshot | None
    snapshot_age_s: float = 0.0
    """Seconds since the directory last answered."""
    own: Mapping[str, VerifierStats] = field(default_factory=dict)
    """Counters that connected verifiers have sent to this gateway, by verifier id; newer than those in the snapshot."""
    connected: frozenset[str] = frozenset()
    in_flight: int = 0
    """Generation requests at this gateway."""
    moves: Mapping[tuple[MoveKind, str, str], int] = field(default_factory=dict)
    """Sequences that went on at another verifier since this gateway started, by kind, cause and new verifier."""

    @property
    def members(self) -> list[MemberView]:
        return self.snapshot.members if self.snapshot is not None else []


class _Window(Generic[R]):
    """One member's reports within `WINDOW_S`, oldest first, all of one incarnation."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, R]] = deque()

    def add(self, now: float, report: R) -> None:
        if self._reports and self._reports[-1][1].started_at != report.started_at:
            self._reports.clear()
        self._reports.append((now, report))
        # The last report before the window is kept, because differences are taken from it.
        while len(self._reports) > 2 and self._reports[1][0] <= now - WINDOW_S:
            self._reports.popleft()

    @property
    def old(self) -> R:
        return self._reports[0][1]

    @property
    def new(self) -> R:
        return self._reports[-1][1]

    @property
    def seconds(self) -> float:
        return self._reports[-1][0] - self._reports[0][0]

    def steps(self) -> Iterable[tuple[float, R, R]]:
        """Each two neighbouring reports, with the seconds between them."""
        reports = list(self._reports)
        return [(new[0] - old[0], old[1], new[1]) for old, new in pairwise(reports)]


def _advanced(windows: Mapping[str, _Window[R]], now: float, reports: Mapping[str, R]) -> dict[str, _Window[R]]:
    """The windows of the members that have a report, with the report added."""
    kept = {key: windows.get(key) or _Window[R]() for key in reports}
    for key, report in reports.items():
        kept[key].add(now, report)
    return kept


@dataclass
class _Flow:
    """Work done within their windows by one verifier or several."""

    tokens: int = 0
    tokens_per_s: float = 0.0
    sequence_s: float = 0.0
    """Running sequences, integrated over time."""
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)
    drafts: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, windows: Iterable[_Window[VerifierStats]]) -> _Flow:
        flow = cls()
        for window in windows:
            old, new = window.old, window.new
            tokens = max(0, new.tokens - old.tokens)
            flow.tokens += tokens
            flow.tokens_per_s += _ratio(tokens, window.seconds) or 0.0
            flow.sequence_s += sum(seconds * (before.running + after.running) / 2 for seconds, before, after in window.steps())
            flow.busy_s += max(0.0, new.busy_s - old.busy_s)
            for cause, spent in new.idle_s.items():
                flow.idle_s[cause] = flow.idle_s.get(cause, 0.0) + max(0.0, spent - old.idle_s.get(cause, 0.0))
            for drafter, counters in new.drafters.items():
                before = old.drafters.get(drafter, DraftCounters())
                flow.drafts += max(0, counters.drafts - before.drafts)
                flow.accepted += max(0, counters.accepted_tokens - before.accepted_tokens)
        return flow

    @property
    def tgs(self) -> float | None:
        return _ratio(self.tokens, self.sequence_s, 1) if self.tokens else None

    @property
    def acceptance_length(self) -> float | None:
        return _acceptance_length(self.accepted, self.drafts)

    def shares(self) -> tuple[float | None, dict[str, float]]:
        """Busy share of time, and idle shares by cause; their sum is 1."""
        # Relative to the counters' own time (busy + idle = wall), because they advance only with each step.
        wall = self.busy_s + sum(self.idle_s.values())
        if wall <= 0:
            return None, {}
        return round(self.busy_s / wall, 4), {cause: round(spent / wall, 4) for cause, spent in self.idle_s.items()}


class FleetHistory:
    """Takes observations, and makes the view of the last one."""

    def __init__(self) -> None:
        self._verifiers: dict[str, _Window[VerifierStats]] = {}
        self._drafters: dict[str, _Window[DrafterStats]] = {}
        self._log = FleetLog()
        self._last = Observation(0.0, 0.0, None)
        self._served: dict[str, list[str]] = {}
        """The verifiers assigned to each drafter, by drafter id."""

    def observe(self, seen: Observation) -> None:
        """Takes in an observation; `seen.now` must never decrease."""
        alive = [view for view in seen.members if view.member.state != "lost"]
        verifiers = {each.member.id: seen.own.get(each.member.id) or each.verifier for each in alive}
        reports = {key: stats for key, stats in verifiers.items() if stats is not None}
        self._verifiers = _advanced(self._verifiers, seen.now, reports)
        drafters = {each.member.id: each.drafter for each in alive if each.drafter is not None}
        self._drafters = _advanced(self._drafters, seen.now, drafters)
        self._log.observe(seen.unix, seen.snapshot, reports, seen.moves)
        self._served = {}
        for each in seen.snapshot.assignments if seen.snapshot is not None else []:
            self._served.setdefault(each.drafter_id, []).append(each.verifier_id)
        self._last = seen

    def view(self) -> FleetView:
        seen, snapshot = self._last, self._last.snapshot
        verifiers = [self._verifier(each) for each in seen.members if each.member.kind == "verifier"]
        return FleetView(
            at=round(seen.unix, 3),
            window_s=WINDOW_S,
            version=snapshot.version if snapshot is not None else 0,
            snapshot_age_s=round(seen.snapshot_age_s, 1) if snapshot is not None else None,
            totals=_totals(seen, verifiers, _Flow.of(self._verifiers.values())),
            verifiers=verifiers,
            drafters=[self._drafter(each) for each in seen.members if each.member.kind == "drafter"],
            pairs=self._pairs(),
            counters=dict(snapshot.counters) if snapshot is not None else {},
            moved=_moved(seen),
            log=self._log.latest(),
            plans=self._log.latest_plans(),
        )

    def _verifier(self, view: MemberView) -> VerifierRow:
        member = view.member
        connected, heard = member.id in self._last.connected, round(view.last_report_s, 1)
        row = VerifierRow(member.id, member.node, member.model, member.state, connected, heard)
        window = self._verifiers.get(member.id)
        if window is None:
            return row
        stats, flow = window.new, _Flow.of([window])
        for name in _COPIED:
            setattr(row, name, getattr(stats, name))
        row.kv_usage = round(stats.kv_usage, 4)
        row.tokens_per_s, row.tgs = round(flow.tokens_per_s, 1), flow.tgs
        row.acceptance_length = flow.acceptance_length
        row.busy, row.idle = flow.shares()
        return row

    def _drafter(self, view: MemberView) -> DrafterRow:
        member = view.member
        row = DrafterRow(member.id, member.node, member.model, member.state, round(view.last_report_s, 1), [])
        row.verifiers = self._served.get(member.id, [])
        window = self._drafters.get(member.id)
        if window is not None:
            old, new = window.old, window.new
            row.sequences, row.cache_usage = new.sequences, round(new.cache_usage, 4)
            busy = _ratio(new.busy_s - old.busy_s, window.seconds, 4)
            row.busy = min(1.0, busy) if busy is not None else None
            row.draft_tokens_per_s = _ratio(new.draft_tokens - old.draft_tokens, window.seconds, 1)
            if new.learning is not None:
                for name in ("version", "live_acceptance", "previous_version", "previous_acceptance"):
                    setattr(row, name, getattr(new.learning, name))
        return row

    def _pairs(self) -> list[PairRow]:
        bound = {(verifier, drafter) for drafter, verifiers in self._served.items() for verifier in verifiers}
        rows = {pair: PairRow(*pair, bound=True, down=False) for pair in bound}
        for verifier, window in self._verifiers.items():
            for drafter, counters in window.new.drafters.items():
                before = window.old.drafters.get(drafter, DraftCounters())
                row = _pair(verifier, drafter, before, counters, window.seconds)
                row.bound = (verifier, drafter) in bound
                if row.bound or row.drafts_per_s > 0:
                    rows[verifier, drafter] = row
            for drafter in window.new.drafters_down:
                if (verifier, drafter) in rows:
                    rows[verifier, drafter].down = True
        return [rows[pair] for pair in sorted(rows)]


def _pair(verifier: str, drafter: str, old: DraftCounters, new: DraftCounters, seconds: float) -> PairRow:
    drafts, rounds = new.drafts - old.drafts, new.rounds - old.rounds
    dropped = sum(new.dropped.values()) - sum(old.dropped.values())
    return PairRow(
        verifier,
        drafter,
        bound=False,
        down=False,
        acceptance_length=_acceptance_length(new.accepted_tokens - old.accepted_tokens, drafts),
        drafts_per_s=_ratio(drafts, seconds, 1) or 0.0,
        round_trip_ms=_ratio(1000 * (new.round_trip_s - old.round_trip_s), rounds, 2),
        dropped_per_s=_ratio(dropped, seconds, 2) or 0.0,
    )


def _totals(seen: Observation, rows: list[VerifierRow], fleet: _Flow) -> Totals:
    members: dict[str, dict[str, int]] = {}
    for view in seen.members:
        of_kind = members.setdefault(view.member.kind, {})
        of_kind[view.member.state] = of_kind.get(view.member.state, 0) + 1
    busy, idle = fleet.shares()
    return Totals(
        members=members,
        running=sum(row.running for row in rows),
        waiting=sum(row.waiting for row in rows),
        in_flight=seen.in_flight,
        kv_usage=max((row.kv_usage for row in rows), default=0.0),
        tokens_per_s=round(fleet.tokens_per_s, 1),
        tgs=fleet.tgs,
        acceptance_length=fleet.acceptance_length,
        busy=busy,
        idle=idle,
    )


def _moved(seen: Observation) -> dict[str, int]:
    moved = {"failover": 0, "migration": 0}
    for (kind, _, _), count in seen.moves.items():
        moved[kind] += count
    return moved


def _acceptance_length(accepted: int, drafts: int) -> float | None:
    return round(1 + accepted / drafts, 3) if drafts > 0 else None


def _ratio(part: float, whole: float, digits: int = 9) -> float | None:
    return max(0.0, round(part / whole, digits)) if whole > 0 else None
