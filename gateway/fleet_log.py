"""The logs of fleet events (members, assignments, plans), found by comparing successive snapshots.  Pure; two bounded logs.

The coordinator keeps no history, so each gateway has its own, from the gateway's start on.  Of several changes within one
polling interval of the directory, only the result is visible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec

from backend.fleet import FleetSnapshot, Learning, Member, VerifierStats

if TYPE_CHECKING:
    from gateway.in_flight import MoveKind

KEPT, SHOWN = 200, 40
Happening = Literal[
    "joined",
    "ready",
    "draining",
    "lost",
    "restarted",
    "left",
    "assigned",
    "moved",
    "released",
    "failover",
    "migration",
    "head",
    "plan",
]


class LogEntry(msgspec.Struct, frozen=True):
    """One line of a log."""

    number: int
    """Counts the entries of both logs together."""
    at: float
    """Unix seconds at which this gateway noticed the event."""
    kind: Happening
    member: str
    text: str


class FleetLog:
    """Compares each observation with the one before, and logs the differences."""

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=KEPT)
        # A log of its own, because mode `auto` may change its plan several times a second and would push out other entries.
        self._plans: deque[LogEntry] = deque(maxlen=KEPT)
        self._number = 0
        self._members: dict[str, Member] | None = None
        self._bound: frozenset[tuple[str, str]] = frozenset()
        self._heads: dict[str, Learning] = {}
        self._seen: FleetSnapshot | None = None
        self._stats: dict[str, VerifierStats] = {}
        self._moves: dict[tuple[MoveKind, str, str], int] = {}

    def observe(
        self,
        at: float,
        snapshot: FleetSnapshot | None,
        stats: Mapping[str, VerifierStats],
        moves: Mapping[tuple[MoveKind, str, str], int],
    ) -> None:
        """`stats`: latest counters by verifier; `moves`: numbers of moved sequences by kind, cause and new verifier."""
        if snapshot is not None and snapshot is not self._seen:
            members = {view.member.id: view.member for view in snapshot.members if view.member.kind != "gateway"}
            bound = frozenset((each.verifier_id, each.drafter_id) for each in snapshot.assignments)
            heads = {each.drafter_id: each.learning for view in snapshot.members if (each := view.drafter) and each.learning}
            if self._members is not None:
                self._note_members(at, self._members, members)
                self._note_assignments(at, bound)
                self._note_heads(at, heads)
            self._members, self._bound, self._heads, self._seen = members, bound, heads, snapshot
        self._note_moves(at, moves)
        self._note_plans(at, stats)
        self._stats = dict(stats)

    def latest(self) -> list[LogEntry]:
        """Events of members, assignments and sequences, the latest first."""
        return list(islice(reversed(self._entries), SHOWN))

    def latest_plans(self) -> list[LogEntry]:
        """Verifiers' changes of plan, the latest first."""
        return list(islice(reversed(self._plans), SHOWN))

    def _note_members(self, at: float, before: Mapping[str, Member], after: Mapping[str, Member]) -> None:
        for key, member in after.items():
            known = before.get(key)
            if known is None:
                self._note(at, "joined", key, f"{key} joined, {member.state}")
            elif known.incarnation != member.incarnation:
                self._note(at, "restarted", key, f"{key} is another process now, {member.state}")
            elif known.state != member.state and member.state != "starting":
                words = {
                    "ready": "is ready",
                    "draining": "takes no new work",
                    "lost": "has not reported in time",
                }
                self._note(at, member.state, key, f"{key} {words[member.state]}")
        for key in before.keys() - after.keys():
            self._note(at, "left", key, f"{key} left the fleet")

    def _note_assignments(self, at: float, bound: frozenset[tuple[str, str]]) -> None:
        gained, gone = _by_drafter(bound - self._bound), _by_drafter(self._bound - bound)
        for drafter in sorted(gained.keys() | gone.keys()):
            to, away = ", ".join(gained.get(drafter, ())), ", ".join(gone.get(drafter, ()))
            if to and away:
                self._note(at, "moved", drafter, f"{drafter} moved from {away} to {to}")
            elif to:
                self._note(at, "assigned", drafter, f"{drafter} serves {to}")
            else:
                self._note(at, "released", drafter, f"{drafter} no longer serves {away}")

    def _note_heads(self, at: float, heads: Mapping[str, Learning]) -> None:
        for drafter, new in heads.items():
            old = self._heads.get(drafter)
            if old is not None and old.version != new.version:
                known = old.live_acceptance is not None
                share = f"; of version {old.version}, {old.live_acceptance:.0%} of drafts began right" if known else ""
                self._note(at, "head", drafter, f"{drafter} drafts with version {new.version}{share}")

    def _note_moves(self, at: float, moves: Mapping[tuple[MoveKind, str, str], int]) -> None:
        for (kind, cause, verifier), count in moves.items():
            new = count - self._moves.get((kind, cause, verifier), 0)
            if new:
                many = "1 sequence" if new == 1 else f"{new} sequences"
                words = "after a loss" if kind == "failover" else "on purpose"
                self._note(at, kind, verifier, f"{many} moved to {verifier} {words} ({cause.replace('_', ' ')})")
        self._moves = dict(moves)

    def _note_plans(self, at: float, stats: Mapping[str, VerifierStats]) -> None:
        for key, new in stats.items():
            old = self._stats.get(key)
            if old is None or old.started_at != new.started_at or old.plan_changes == new.plan_changes:
                continue
            changes = new.plan_changes - old.plan_changes
            before, after = plan_words(old), plan_words(new)
            times = f" ({changes} changes)" if changes > 1 else ""
            text = f"{key}: {before} → {after}{times}" if before != after else f"{key}: {after} again, after {changes} changes"
            self._append(self._plans, at, "plan", key, text)

    def _note(self, at: float, kind: Happening, member: str, text: str) -> None:
        self._append(self._entries, at, kind, member, text)

    def _append(self, log: deque[LogEntry], at: float, kind: Happening, member: str, text: str) -> None:
        self._number += 1
        log.append(LogEntry(self._number, round(at, 3), kind, member, text))


def plan_words(stats: VerifierStats) -> str:
    """A verifier's plan in words: `K 8, 4 outcomes ahead`."""
    if stats.plan_k == 0:
        return "drafters not asked"
    if stats.plan_outcomes:
        return f"K {stats.plan_k}, {stats.plan_outcomes} outcomes ahead"
    return f"K {stats.plan_k}"


def _by_drafter(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verifier, drafter in sorted(pairs):
        found.setdefault(drafter, []).append(verifier)
    return found
