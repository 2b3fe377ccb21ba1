"""Moves this gateway's running requests from slow verifiers to fast ones, now and then.  One task in the event loop.

`backend.routing.balance`, which is pure, decides whether a move is worth it.  This module brings it the counters that
verifiers send, and moves requests with `FleetCore.migrate`.  Several gateways balance side by side, each its own requests:
the limit per decision keeps what they do between two reports of a verifier small.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from backend.config import Settings
from backend.fleet import VerifierStats
from backend.fleet.speed import RESPONSE_TOKENS, Speed, mean_speed
from backend.routing.balance import Limits, Load, Movable, Move, expected_remaining, plan_moves
from gateway.engine_link import VerifierLink
from gateway.fleet_core import FleetCore
from gateway.in_flight import InFlight

logger = logging.getLogger(__name__)


class Balancer:
    """Call `start` in the running event loop."""

    def __init__(self, core: FleetCore, settings: Settings) -> None:
        self._core = core
        self._interval_s = settings.gateway.balance_interval_s
        self._limits = Limits()
        self._slots = settings.verifier.max_num_seqs
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to balance; does nothing where it is switched off."""
        if self._task is None and self._interval_s > 0:
            self._task = asyncio.create_task(self._run(), name="balance")

    def stop(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self.balance(time.monotonic())
            except Exception:
                # Serving does without; this loop must outlive whatever it meets.
                logger.exception("balancing failed")

    def balance(self, now: float) -> int:
        """Looks at the fleet once; returns how many requests were moved."""
        known = [(link, link.stats) for link in self._core.ready_links if link.stats is not None]
        usual, prefill = mean_speed([each.speed for _, each in known if each.speed is not None]), _prefill(known)
        if len(known) < 2 or usual is None or prefill is None:
            return 0
        # One that has not worked yet is taken to be like the others.
        loads = [self._load(link, stats, stats.speed or usual, _prefill([(link, stats)]) or prefill) for link, stats in known]
        tokens = {link.member.id: stats.response_tokens for link, stats in known}
        movables = [
            _movable(each, each.link, tokens.get(each.link.member.id, RESPONSE_TOKENS))
            for each in self._core.sequences
            if each.link is not None
        ]
        moves = plan_moves(loads, movables, self._limits, now)
        return sum(self._carry_out(move) for move in moves)

    def _load(self, link: VerifierLink, stats: VerifierStats, speed: Speed, prefill: float) -> Load:
        blocks = link.welcome.num_kv_blocks * link.welcome.block_size if link.welcome is not None else 0
        return Load(
            id=link.member.id,
            requests=stats.running + stats.waiting,
            speed=speed,
            prefill_tokens_per_s=prefill,
            slots=self._slots,
            free_tokens=int((1 - stats.kv_usage) * blocks),
            takes_requests=link.member.state == "ready",
        )

    def _carry_out(self, move: Move) -> int:
        logger.info(
            "balancing: %s -> %s, predicted gain %.2f s for %.2f s of recomputation",
            move.source,
            move.target,
            move.gain_s,
            move.cost_s,
        )
        return self._core.migrate([move.request_id], move.target, "balance")


def _prefill(known: Sequence[tuple[VerifierLink, VerifierStats]]) -> float | None:
    """Prompt tokens per second, over all of these; None where none was computed yet."""
    tokens, seconds = sum(each.prefill_tokens for _, each in known), sum(each.prefill_s for _, each in known)
    return tokens / seconds if tokens and seconds > 0 else None


def _movable(record: InFlight, link: VerifierLink, typical: float) -> Movable:
    params = record.request.sampling_params
    limit = params.max_tokens or 0 if params is not None else 0
    return Movable(
        id=record.request.request_id,
        verifier_id=link.member.id,
        tokens=record.tokens,
        remaining=expected_remaining(len(record.emitted), limit, typical),
        placed_at=record.placed_at,
    )
