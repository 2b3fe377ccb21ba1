"""Moves this gateway's running requests from slow verifiers to fast ones, now and then.  One task in the event loop.

Whether a move is worth it is decided by `backend.balance`, which is pure; this module brings it the counters that verifiers
send and carries out what it decides with `FleetCore.migrate`.  Several gateways balance side by side, each its own requests:
the limit per decision keeps what they do between two reports of a verifier small.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict

from backend.balance import Limits, Load, Movable, Move, Speed, expected_remaining, plan_moves
from backend.config import Settings
from backend.fleet import VerifierStats
from gateway.engine_link import VerifierLink
from gateway.fleet_core import FleetCore
from gateway.in_flight import InFlight

logger = logging.getLogger(__name__)

FIRST_GUESS_TOKENS = 64.0
"""What a request is expected to emit until some have ended."""


class Balancer:
    """Call `start` in the running event loop."""

    def __init__(self, core: FleetCore, settings: Settings) -> None:
        self._core = core
        self._interval_s = settings.gateway.balance_interval_s
        self._limits = Limits(moves=settings.gateway.balance_moves, dwell_s=settings.gateway.balance_dwell_s)
        self._slots = settings.verifier.max_num_seqs
        self._speeds: defaultdict[str, Speed] = defaultdict(Speed)
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
        links = [link for link in self._core.ready_links if link.stats is not None]
        for link in links:
            self._learn(link.stats)
        for gone in self._speeds.keys() - {link.member.id for link in links}:
            del self._speeds[gone]
        if len(links) < 2:
            return 0
        loads = [load for link in links if (load := self._load(link)) is not None]
        typical = self._typical([link.stats for link in links if link.stats is not None])
        movables = [_movable(each, each.link, typical) for each in self._core.sequences if each.link is not None]
        moves = plan_moves(loads, movables, self._limits, now)
        return sum(self._carry_out(move) for move in moves)

    def _learn(self, stats: VerifierStats | None) -> None:
        if stats is not None:
            self._speeds[stats.verifier_id].observe(stats)

    def _load(self, link: VerifierLink) -> Load | None:
        stats, welcome, speed = link.stats, link.welcome, self._speeds[link.member.id]
        if stats is None or welcome is None:
            return None
        # One that has not worked yet is taken to be like the others.
        cost = speed.step_cost() or self._usual_cost()
        prefill = speed.prefill_tokens_per_s or self._usual_prefill()
        if cost is None or prefill is None:
            return None
        return Load(
            id=link.member.id,
            requests=stats.running + stats.waiting,
            step_fixed_s=cost[0],
            step_per_request_s=cost[1],
            tokens_per_step=speed.tokens_per_step,
            prefill_tokens_per_s=prefill,
            slots=self._slots,
            free_tokens=int((1 - stats.kv_usage) * welcome.num_kv_blocks * welcome.block_size),
            takes_requests=link.member.state == "ready",
        )

    def _usual_cost(self) -> tuple[float, float] | None:
        costs = [cost for speed in self._speeds.values() if (cost := speed.step_cost()) is not None]
        if not costs:
            return None
        return sum(cost[0] for cost in costs) / len(costs), sum(cost[1] for cost in costs) / len(costs)

    def _usual_prefill(self) -> float | None:
        known = [speed.prefill_tokens_per_s for speed in self._speeds.values() if speed.prefill_tokens_per_s is not None]
        return sum(known) / len(known) if known else None

    def _typical(self, stats: list[VerifierStats]) -> float:
        """Tokens that a request of this fleet has emitted on average; one that moves away ends there as an abort."""
        ended = sum(count for each in stats for reason, count in each.requests_finished.items() if reason != "abort")
        return sum(each.tokens for each in stats) / ended if ended else FIRST_GUESS_TOKENS

    def _carry_out(self, move: Move) -> int:
        logger.info(
            "balancing: %s -> %s, predicted gain %.2f s for %.2f s of recomputation",
            move.source,
            move.target,
            move.gain_s,
            move.cost_s,
        )
        return self._core.migrate([move.request_id], move.target, "balance")


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
