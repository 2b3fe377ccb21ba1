"""Requests moved on purpose, compared with the same requests left alone: text, log-probabilities, usage, acceptance length.

Two verifiers with a drafter each, without Ray, and a gateway in this process, so that every request can be moved in its midst.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gateway.in_flight import InFlight
from tests.chaos.workload import Case, Outcome, ask, cases, what_is_wrong
from tests.support.engine_gateway import EngineFleet, engine_fleet

CONCURRENCY = 8
ALLOWED = 0.05
"""By how much acceptance length may differ after a move."""


@dataclass(frozen=True)
class Chunk:
    """One verification of one sequence."""

    at: int
    """Tokens that the sequence had emitted before."""
    tokens: int
    place: int


class Spy:
    """Sees every chunk of every sequence, as the gateway's metrics do."""

    def __init__(self, fleet: EngineFleet) -> None:
        self.chunks: dict[str, list[Chunk]] = {}
        self.keys: dict[str, str] = {}
        self._metrics: Any = fleet.server.gateway.metrics
        self._on_tokens = self._metrics.on_tokens
        self._metrics.on_tokens = self._note

    def close(self) -> None:
        self._metrics.on_tokens = self._on_tokens

    def _note(self, sequence: InFlight, count: int, now: float) -> None:
        request = sequence.request
        self.chunks.setdefault(request.request_id, []).append(Chunk(len(sequence.emitted), count, sequence.places))
        params = request.sampling_params
        # Two runs of one case have this in common, and no other case has it.
        self.keys[request.request_id] = repr(
            (request.prompt_token_ids, params.presence_penalty, params.logprobs, params.stop, params.structured_outputs)
        )
        self._on_tokens(sequence, count, now)


@dataclass
class Moved:
    """What the campaign found."""

    requests: int = 0
    sequences_moved: int = 0
    recovery_s: list[float] = field(default_factory=list)
    before: tuple[float, float] = (0.0, 0.0)
    """Acceptance length up to the cuts: moved, and left alone at the same tokens."""
    after: tuple[float, float] = (0.0, 0.0)
    """The same after the cuts."""
    recomputed_tokens: int = 0
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
        alone_spy = Spy(fleet)
        alone = await _run(fleet, kinds, move=False)
        alone_spy.close()
        moved_spy = Spy(fleet)
        outcomes = await _run(fleet, chosen, move=True)
        moved_spy.close()
        await fleet.quiet()
        found.recomputed_tokens = int(await fleet.metric("outrider_verifier_resumed_total"))
    _compare_answers(found, kinds, alone, outcomes)
    _compare_acceptance(found, alone_spy, moved_spy)
    found.seconds = time.monotonic() - began
    return found


async def _run(fleet: EngineFleet, chosen: list[Case], move: bool) -> list[Outcome]:
    outcomes = [Outcome(case, 0.0) for case in chosen]
    queue = iter(outcomes)

    async def client() -> None:
        for outcome in queue:
            outcome.began = time.monotonic()
            await ask(fleet.http, outcome.case, outcome)

    async def mover() -> None:
        """Moves each sequence once, when it has emitted a third of what it may; the other verifier takes it."""
        while True:
            for record in fleet.core.sequences:
                params = record.request.sampling_params
                if record.places == 1 and len(record.emitted) >= (params.max_tokens or 0) // 3:
                    fleet.core.migrate([record.request.request_id], None, "campaign")
            await asyncio.sleep(0.002)

    moving = asyncio.create_task(mover()) if move else None
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    if moving is not None:
        moving.cancel()
    return outcomes


def _compare_answers(found: Moved, kinds: list[Case], alone: list[Outcome], outcomes: list[Outcome]) -> None:
    known = {id(case): outcome for case, outcome in zip(kinds, alone, strict=True)}
    for outcome in (*alone, *outcomes):
        if outcome.errors:
            found.problems.append(f"failed: {outcome.case.name}: {outcome.errors}")
    for outcome in outcomes:
        if not outcome.errors:
            reason = what_is_wrong(outcome, known[id(outcome.case)])
            if reason is not None:
                found.problems.append(f"wrong: {outcome.case.name}: {reason}")


def _compare_acceptance(found: Moved, alone: Spy, moved: Spy) -> None:
    """Tokens per verification at the same places of the same texts; the token that ends a prefill is none."""
    undisturbed: dict[str, list[Chunk]] = defaultdict(list)
    for request_id, chunks in alone.chunks.items():
        undisturbed[alone.keys[request_id]] += chunks
    sums: dict[str, list[list[int]]] = {"before": [[], []], "after": [[], []]}
    for request_id, chunks in moved.chunks.items():
        there = [chunk for chunk in chunks if chunk.place > 1]
        if not there:
            continue
        found.sequences_moved += 1
        cut = there[0].at
        same = undisturbed[moved.keys[request_id]]
        # The last chunk of a sequence is cut short by its end, in both alike.
        sums["before"][0] += [chunk.tokens for chunk in chunks if chunk.place == 1 and chunk.at]
        sums["before"][1] += [chunk.tokens for chunk in same if 0 < chunk.at < cut]
        sums["after"][0] += [chunk.tokens for chunk in there[1:]]
        sums["after"][1] += [chunk.tokens for chunk in same if chunk.at > cut]
    if not found.sequences_moved:
        found.problems.append("nothing was moved")
        return
    means = {name: tuple(statistics.mean(each) for each in pair) for name, pair in sums.items()}
    found.before, found.after = means["before"], means["after"]  # type: ignore[assignment]
    for name, (one, other) in means.items():
        if abs(one / other - 1) > ALLOWED:
            found.problems.append(f"acceptance length {name} the cut: {one:.3f}, left alone {other:.3f}")
