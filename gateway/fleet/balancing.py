"""Moves this gateway's running requests from slow verifiers to fast ones, now and then.  One task in the event loop.

`backend.routing.balance`, which is pure, decides whether a move pays.  This module passes it the verifiers' counters, and
moves requests with `FleetCore.migrate`.  Several gateways balance side by side, each its own requests.  So the number of moves
per decision is limited, which keeps changes between two reports of a verifier small.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from backend.config import Settings
from backend.fleet import VerifierStats
from backend.fleet.speed import RESPONSE_TOKENS, mean_speed
from backend.routing.balance import BalancingLoad, Movable, expected_remaining, plan_moves
from gateway.fleet.core import FleetCore
from gateway.fleet.engine_link import VerifierLink
from gateway.fleet.sequences import InFlight

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Seconds between two looks at which requests to move."""


async def keep_balanced(core: FleetCore, settings: Settings) -> None:
    """Balances until it is cancelled."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            _balance(core, settings.verifier.max_num_seqs, time.monotonic())
        except Exception:
            # Serving works without balancing, and one failure must not end this loop.
            logger.exception("balancing failed")


def _balance(core: FleetCore, slots: int, now: float) -> None:
    """Makes one decision for the whole fleet."""
    loads = _loads(core.ready_links, slots)
    if len(loads) < 2:
        return
    movables = [_movable(each, each.link) for each in core.sequences if each.link is not None]
    for move in plan_moves(loads, movables, now):
        gain = f"{move.gain_s:.2f} s for {move.cost_s:.2f} s of recomputation"
        logger.info("balancing: %s -> %s, predicted gain %s", move.source, move.target, gain)
        if (record := core.sequences.get(move.request_id)) is not None:
            core.migrate([record], move.target, "balance")


def _loads(links: Sequence[VerifierLink], slots: int) -> list[BalancingLoad]:
    """The loads of all verifiers that have reported; empty before the first of them has measured steps.

    A verifier without measurements is taken to be as fast as the others on average.
    """
    known = [(link, link.stats) for link in links if link.stats is not None]
    usual = mean_speed([stats.speed for _, stats in known if stats.speed is not None])
    prefill = _prefill_speed([stats for _, stats in known])
    if usual is None or prefill is None:
        return []
    return [
        BalancingLoad(
            id=link.member.id,
            requests=stats.running + stats.waiting,
            speed=stats.speed or usual,
            prefill_tokens_per_s=_prefill_speed([stats]) or prefill,
            slots=slots,
            free_tokens=int(
                (1 - stats.kv_usage) * (link.welcome.num_kv_blocks * link.welcome.block_size if link.welcome else 0)
            ),
            takes_requests=link.member.state == "ready",
        )
        for link, stats in known
    ]


def _prefill_speed(stats: Sequence[VerifierStats]) -> float | None:
    """Prompt tokens computed per second, over all of these verifiers; None before the first."""
    tokens, seconds = sum(each.prefill_tokens for each in stats), sum(each.prefill_s for each in stats)
    return tokens / seconds if tokens and seconds > 0 else None


def _movable(record: InFlight, link: VerifierLink) -> Movable:
    params = record.request.sampling_params
    limit = params.max_tokens or 0 if params is not None else 0
    typical = link.stats.response_tokens if link.stats is not None else RESPONSE_TOKENS
    return Movable(
        id=record.request.request_id,
        verifier_id=link.member.id,
        tokens=record.tokens,
        remaining=expected_remaining(len(record.emitted), limit, typical),
        placed_at=record.placed_at,
    )
