"""Requests moved on purpose, compared with the same requests left alone: text, log-probabilities, usage, quality of drafts.

Two verifiers with a drafter each, without Ray, and a gateway in this process, so that every request can be moved in its midst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.fleet import VerifierStats
from backend.routing.routers import Ask, Candidate, Router
from tests.chaos.workload import Case, Outcome, ask, cases, what_is_wrong
from tests.support.engine_gateway import EngineFleet, engine_fleet
from tests.support.fake_verifier import eventually

CONCURRENCY = 8
ALLOWED = 0.05
"""By how much the share of right draft tokens may fall after a move: where drafts end, and so which count, varies a little."""


class OneWay(Router):
    """Routing for this campaign: requests begin at the first verifier, and the second takes them when they are moved."""

    def __init__(self, first: str) -> None:
        self._first = first

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> str | None:
        return min((each.id for each in candidates), key=lambda name: name != self._first, default=None)


@dataclass
class Drafted:
    """Draft tokens of drafters that were compared with the text, verified or not, up to each draft's first wrong one.

    What the budget lets be verified depends on the load, look-ups on what was said before; this does not.
    """

    right: int = 0
    seen: int = 0

    @property
    def share(self) -> float:
        """Of right ones."""
        return self.right / self.seen if self.seen else 0.0

    def __sub__(self, other: Drafted) -> Drafted:
        return Drafted(self.right - other.right, self.seen - other.seen)

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.right + other.right, self.seen + other.seen)


@dataclass
class Moved:
    """What the campaign found."""

    requests: int = 0
    sequences_moved: int = 0
    alone: float = 0.0
    """Share of right draft tokens, the requests left alone."""
    moved: float = 0.0
    """Of the same requests moved, over both verifiers: the same texts, so the same drafts if moving cost nothing."""
    before: float = 0.0
    """Of these, up to the cuts."""
    after: float = 0.0
    """Of these, after the cuts."""
    recovery_s: float = 0.0
    """Mean time without tokens."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


async def migrated(requests: int, tokens: int, mode: str) -> Moved:
    """`requests` requests moved once each in their midst, and the same ones left alone."""
    began = time.monotonic()
    found = Moved(requests)
    kinds = [case for case in cases(tokens) if case.exact and case.body.get("stream")][:requests]
    chosen = [kinds[i % len(kinds)] for i in range(requests)]
    args = {"engine_args": {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}}
    async with engine_fleet(verifiers=2, drafters=2, mode=mode, verifier=args) as fleet:
        first, second = (verifier.name for verifier in fleet.verifiers)
        fleet.core.choosing.reroute(OneWay(first))
        # Drafters learn how to draw from the first texts of a verifier: that is not to count.
        await _run(fleet, chosen, move=False)
        start = await _drafted(fleet)
        # Every kind as often as it will be moved.
        alone = await _run(fleet, chosen, move=False)
        middle = await _drafted(fleet)
        outcomes = await _run(fleet, chosen, move=True)
        end = await _drafted(fleet)
        found.sequences_moved = int(await fleet.metric("outrider_migrations_total"))
        found.recovery_s = await fleet.metric("outrider_recovery_seconds_sum") / max(found.sequences_moved, 1)
    found.alone = (middle[first] - start[first]).share
    before, after = end[first] - middle[first], end[second] - middle[second]
    found.before, found.after, found.moved = before.share, after.share, (before + after).share
    if found.sequences_moved < requests * 0.9:
        found.problems.append(f"only {found.sequences_moved} sequences were moved")
    if found.moved < (1 - ALLOWED) * found.alone:
        found.problems.append(f"{found.moved:.3f} of draft tokens right in moved requests, {found.alone:.3f} left alone")
    _compare_answers(found, alone, outcomes)
    found.seconds = time.monotonic() - began
    return found


async def _drafted(fleet: EngineFleet) -> dict[str, Drafted]:
    """By verifier, all there is so far."""
    await fleet.quiet()
    # Counters are sent four times a second; those that are here may be from before the end.
    seen = {stats.verifier_id: stats.busy_s for stats in fleet.core.stats()}
    await eventually(lambda: all(stats.busy_s > seen.get(stats.verifier_id, -1.0) for stats in fleet.core.stats()))
    return {stats.verifier_id: _of_drafters(stats) for stats in fleet.core.stats()}


def _of_drafters(stats: VerifierStats) -> Drafted:
    kinds = [reliability for kind, reliability in stats.reliability.items() if kind in ("fresh", "ahead")]
    return Drafted(sum(sum(kind.right) for kind in kinds), sum(sum(kind.seen) for kind in kinds))


async def _run(fleet: EngineFleet, chosen: list[Case], move: bool) -> list[Outcome]:
    outcomes = [Outcome(case, 0.0) for case in chosen]
    queue = iter(outcomes)

    async def client() -> None:
        for outcome in queue:
            outcome.began = time.monotonic()
            await ask(fleet.http, outcome.case, outcome)

    async def mover() -> None:
        """Moves each sequence once, early in its midst, so that most of it is emitted after the cut."""
        while True:
            for record in fleet.core.sequences:
                params = record.request.sampling_params
                if record.places == 1 and len(record.emitted) >= (params.max_tokens or 0) // 6:
                    fleet.core.migrate([record.request.request_id], None, "campaign")
            await asyncio.sleep(0.002)

    moving = asyncio.create_task(mover()) if move else None
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    if moving is not None:
        moving.cancel()
    return outcomes


def _compare_answers(found: Moved, alone: list[Outcome], outcomes: list[Outcome]) -> None:
    for outcome in (*alone, *outcomes):
        if outcome.errors:
            found.problems.append(f"failed: {outcome.case.name}: {outcome.errors}")
    for reference, outcome in zip(alone, outcomes, strict=True):
        if not outcome.errors and not reference.errors:
            reason = what_is_wrong(outcome, reference)
            if reason is not None:
                found.problems.append(f"wrong: {outcome.case.name}: {reason}")
