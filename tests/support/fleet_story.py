"""A fleet that exists only as reports, which tests advance by hand; it has the part of `FleetCore` that `/fleet` reads.

Verifiers decode at steady rates.  Drafter i serves verifier i mod the number of verifiers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from anyio.from_thread import start_blocking_portal
from msgspec.structs import replace

from backend.fleet import (
    Assignment,
    DraftCounters,
    DrafterStats,
    FleetSnapshot,
    Member,
    MemberKind,
    MemberState,
    MemberView,
    VerifierStats,
)
from gateway.fleet.core import FleetCore
from gateway.metrics.fleet import fleet_document
from gateway.metrics.gateway import GatewayMetrics
from tests.support.running_gateway import running_gateway

STEP_S = 0.02
"""Seconds of a verifier's step.  Each verifier with load is 70 % busy, waits for drafts for 20 %, and has no work for 10 %."""


def member(name: str, kind: MemberKind, state: MemberState = "ready", incarnation: str = "first") -> Member:
    return Member(name, kind, incarnation, "ipc://nowhere", "", f"node-{int(name[-1]) % 3}", 100, "demo", state)


class Story:
    """The fleet.  A test changes its attributes, then calls `advance`."""

    def __init__(self, verifiers: int = 2, drafters: int = 3) -> None:
        self.members = {f"verifier-{i}": member(f"verifier-{i}", "verifier") for i in range(verifiers)}
        self.members |= {f"drafter-{i}": member(f"drafter-{i}", "drafter") for i in range(drafters)}
        self.bound = {f"drafter-{i}": f"verifier-{i % verifiers}" for i in range(drafters)} if verifiers else {}
        self.load = {f"verifier-{i}": 3 + 5 * i % 17 for i in range(verifiers)}
        """Running sequences by verifier; 0: no work."""
        self.silent_s: dict[str, float] = {}
        self.counters = {"registrations": verifiers + drafters, "restarts": 0}
        self.verifiers = {name: VerifierStats(name, 1000.0, "auto", 8, plan_k=4, plan_outcomes=8) for name in self.load}
        self.drafters = {name: DrafterStats(name, 1000.0) for name in self.members if name.startswith("drafter")}
        self.metrics = GatewayMetrics()
        self.version = 0
        self.snapshot: FleetSnapshot | None = None
        self.gate = SimpleNamespace(sequences=0)

    def advance(self, seconds: float = 1.0) -> None:
        """Lets the fleet work for `seconds`, then report."""
        for name, stats in self.verifiers.items():
            self.verifiers[name] = self._worked(stats, seconds)
        for name, each in self.drafters.items():
            serving = [self.bound[name]] if name in self.bound else []
            self.drafters[name] = replace(
                each,
                draft_tokens=each.draft_tokens + int(400 * seconds * len(serving)),
                busy_s=each.busy_s + 0.4 * seconds * len(serving),
                sequences=sum(self.load[v] for v in serving),
                cache_usage=0.3,
                verifiers=serving,
            )
        self.tell()

    def tell(self) -> None:
        """Makes the directory's next snapshot."""
        self.version += 1
        views = [
            MemberView(each, self.silent_s.get(name, 0.1), self.verifiers.get(name), self.drafters.get(name))
            for name, each in sorted(self.members.items())
        ]
        bound = [Assignment(v, d, 1) for d, v in sorted(self.bound.items()) if {v, d} <= self.members.keys()]
        self.snapshot = FleetSnapshot(self.version, views, bound, dict(self.counters))

    def _worked(self, old: VerifierStats, seconds: float) -> VerifierStats:
        running = self.load[old.verifier_id]
        steps = int(seconds / STEP_S) if running else 0
        drafters = dict(old.drafters)
        mine = [drafter for drafter, verifier in self.bound.items() if verifier == old.verifier_id]
        for index, name in enumerate(mine):
            drafters[name] = self._drafted(drafters.get(name, DraftCounters()), steps * running // len(mine), index)
        new = sum(each.accepted_tokens for each in drafters.values()) - sum(e.accepted_tokens for e in old.drafters.values())
        shares = {"no_work": 0.1, "awaiting_draft": 0.2} if running else {"no_work": 1.0}
        return replace(
            old,
            busy_s=old.busy_s + (0.7 * seconds if running else 0.0),
            idle_s={cause: spent + shares.get(cause, 0.0) * seconds for cause, spent in old.idle_s.items()},
            steps=old.steps + steps,
            tokens=old.tokens + steps * running + new,
            verifications=old.verifications + steps * running,
            running=running,
            waiting=max(0, running - 14),
            tokens_in_flight=300 * running,
            kv_usage=min(0.97, 0.06 * running),
            drafters=drafters,
        )

    def _drafted(self, old: DraftCounters, drafts: int, index: int) -> DraftCounters:
        return replace(
            old,
            drafts=old.drafts + drafts,
            draft_tokens=old.draft_tokens + 4 * drafts,
            accepted_tokens=old.accepted_tokens + (2 - index % 2) * drafts,
            rounds=old.rounds + drafts,
            round_trip_s=old.round_trip_s + 0.008 * drafts,
        )

    # The part of `FleetCore` that `/fleet` reads.

    def stats(self) -> list[VerifierStats]:
        return [stats for name, stats in self.verifiers.items() if self._answers(name)]

    @property
    def links(self) -> dict[str, Any]:
        return {name: SimpleNamespace(state="ready") for name in self.verifiers if self._answers(name)}

    def _answers(self, name: str) -> bool:
        return name in self.members and self.members[name].state != "lost"


@contextmanager
def served(story: Story, port: int = 0, api_key: str | None = None) -> Iterator[str]:
    """A gateway whose `/fleet` tells of `story`, which goes on for a second first; gives the address."""
    story.advance(1.0)
    told = mock.patch("gateway.routes.operations.fleet_document", side_effect=lambda _: fleet_document(cast(FleetCore, story)))
    running = running_gateway(mode="auto", port=port, api_key=api_key)
    with told, start_blocking_portal() as portal, portal.wrap_async_context_manager(running) as gateway:
        yield gateway.server.url
