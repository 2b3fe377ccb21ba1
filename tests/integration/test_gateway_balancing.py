"""The gateway moves running requests to a faster verifier, if it may: fake verifiers that report what a test says."""

from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest import mock

from backend.fleet import VerifierStats
from backend.fleet.speed import Speed
from backend.routing import balance
from gateway.fleet import balancing
from tests.support.fake_verifier import FakeVerifier, eventually, stall
from tests.support.running_gateway import running_gateway

REQUESTS = 6


def report(verifier: FakeVerifier, running: int, looks: int) -> None:
    """The counters of a verifier that has taken 50 ms for each step over so many requests."""
    stats = VerifierStats(verifier.name, 1.0, "off", 4, running=running, prefill_tokens=1000, prefill_s=0.1)
    stats.decode_steps = 10 * looks
    stats.speed = Speed(0.025, 0.025 / max(running, 1)) if running else None
    verifier.publish(stats)


@asynccontextmanager
async def crowded(tmp_path, dwell_s=0.0):
    """One verifier with all the requests, and one that has just come."""
    with mock.patch.multiple(balance, MOVES=2, DWELL_S=dwell_s), mock.patch.object(balancing, "INTERVAL_S", 0.02):
        async with running_gateway() as running:
            running.verifier.behaviour = stall
            for _ in range(REQUESTS):
                running.begin(stream=True, max_tokens=200)
            await running.until_emitted(REQUESTS)
            idle = FakeVerifier(tmp_path, "idle").start()
            idle.behaviour = stall
            running.directory.set_members([running.verifier.member, idle.member])
            await eventually(lambda: len(running.core.ready_links) == 2)
            try:
                yield running, idle
            finally:
                await running.leave()
                idle.close()


async def reports(running, idle, looks: int) -> None:
    """Both verifiers tell of what they have, and the gateway has heard them."""
    report(running.verifier, running.core.sequences.placed("verifier-0"), looks)
    report(idle, running.core.sequences.placed("idle"), looks)
    links = running.core.ready_links
    await eventually(lambda: all(link.stats and link.stats.decode_steps == 10 * looks for link in links))


async def test_a_gateway_balances_by_itself(tmp_path):
    async with crowded(tmp_path) as (running, idle):
        looks = 0
        while not idle.sequences:
            looks += 1
            await reports(running, idle, looks)
        assert await running.metric("outrider_migrations_total", cause="balance") >= 1


async def test_nothing_moves_that_was_just_placed(tmp_path, monkeypatch):
    plans: list[Any] = []

    def planned(*given: Any) -> Any:
        plans.append(balance.plan_moves(*given))
        return plans[-1]

    monkeypatch.setattr(balancing, "plan_moves", planned)
    async with crowded(tmp_path, dwell_s=1000) as (running, idle):
        for looks in range(1, 10):
            await reports(running, idle, looks)
            await eventually(partial(lambda made: len(plans) >= made, len(plans) + 1))
        assert not any(plans)
        assert idle.sequences == []
