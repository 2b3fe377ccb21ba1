"""Moves this gateway's running requests from slow verifiers to fast ones, now and then.  One task in the event loop.

`backend.routing.balance`, which is pure, decides whether a move pays.  This module passes it the verifiers' counters, and
moves requests with `FleetCore.migrate`.  Several gateways balance side by side, each its own requests.  So the number of moves
per decision is limited, which keeps changes between two reports of a verifier small.
"""

import asyncio
import logging
import time

from backend.config import Settings
from backend.fleet import VerifierStats
from backend.fleet.speed import RESPONSE_TOKENS
from backend.routing.balance import Movable, Move, MoveLimits, Reported, expected_remaining, plan_moves, reported_loads
from gateway.fleet.core import FleetCore
from gateway.fleet.engine_link import VerifierLink
from gateway.fleet.sequences import InFlight

logger = logging.getLogger(__name__)


class Balancer:
    """Decides again and again, each time for the whole fleet."""

    def __init__(self, core: FleetCore, settings: Settings) -> None:
        self._core = core
        self._interval_s = settings.gateway.balance_interval_s
        self._limits = MoveLimits()
        self._slots = settings.verifier.max_num_seqs

    async def run(self) -> None:
        """Balances until it is cancelled; not at all if the setting `gateway.balance_interval_s` is 0."""
        while self._interval_s > 0:
            await asyncio.sleep(self._interval_s)
            try:
                self.balance(time.monotonic())
            except Exception:
                # Serving works without balancing, and one failure must not end this loop.
                logger.exception("balancing failed")

    def balance(self, now: float) -> int:
        """Makes one decision for the whole fleet.  Returns how many requests were moved."""
        known = [_reported(link, link.stats) for link in self._core.ready_links if link.stats is not None]
        loads = reported_loads(known, self._slots)
        if len(loads) < 2:
            return 0
        tokens = {each.id: each.stats.response_tokens for each in known}
        movables = [
            _movable(each, each.link, tokens.get(each.link.member.id, RESPONSE_TOKENS))
            for each in self._core.sequences
            if each.link is not None
        ]
        moves = plan_moves(loads, movables, self._limits, now)
        return sum(self._carry_out(move) for move in moves)

    def _carry_out(self, move: Move) -> int:
        gain = f"{move.gain_s:.2f} s for {move.cost_s:.2f} s of recomputation"
        logger.info("balancing: %s -> %s, predicted gain %s", move.source, move.target, gain)
        record = self._core.sequences.get(move.request_id)
        return 0 if record is None else self._core.migrate([record], move.target, "balance")


def _reported(link: VerifierLink, stats: VerifierStats) -> Reported:
    blocks = link.welcome.num_kv_blocks * link.welcome.block_size if link.welcome is not None else 0
    return Reported(link.member.id, stats, blocks, link.member.state == "ready")


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
