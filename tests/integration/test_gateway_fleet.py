"""The gateway and its fleet: who gets requests, who comes and goes, what moves to a faster verifier."""

import asyncio
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import msgspec

from backend.fleet import FleetSnapshot, Member, Orders, VerifierStats
from backend.fleet.speed import Speed
from backend.routing import balance
from gateway.fleet import balancing
from gateway.fleet.directory import Directory
from tests.support.fake_verifier import FakeVerifier, StaticDirectory, eventually, stall
from tests.support.running_gateway import COMPLETION, Running, running_gateway


async def test_members_come_restart_and_drain():
    async with running_gateway() as running:
        second = running.another("verifier-1", max_model_len=128)
        running.directory.set_members([running.verifier.member, second.member])
        await eventually(lambda: len(running.core.ready_links) == 2)
        # The smallest context of the fleet is what clients may use.
        assert (await running.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 128

        draining = msgspec.structs.replace(running.verifier.member, state="draining")
        restarted = running.another("verifier-1")
        running.directory.set_members([draining, restarted.member])
        await eventually(lambda: [link.member.incarnation for link in running.core.routable_links()] == [restarted.incarnation])
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert len(restarted.sequences) == 1


async def test_serving_goes_on_while_the_directory_fails_or_knows_nobody():
    async with running_gateway() as running:
        polls = 0

        async def fail() -> FleetSnapshot:
            nonlocal polls
            polls += 1
            raise OSError("gone")

        running.directory.snapshot = fail  # type: ignore[method-assign]
        await eventually(lambda: polls >= 2)
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        running.directory.snapshot = StaticDirectory([]).snapshot  # type: ignore[method-assign]
        await eventually(lambda: running.core.snapshot.members == [])
        # A coordinator that has just restarted knows nobody; who still answers still serves.
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_lost_connection_comes_back_while_the_directory_hangs():
    async with running_gateway() as running:
        called = asyncio.Event()

        async def hang() -> FleetSnapshot:
            called.set()
            await asyncio.Event().wait()
            raise AssertionError

        running.directory.snapshot = hang  # type: ignore[method-assign]
        await called.wait()
        (link,) = running.core.ready_links
        link.close()
        await eventually(lambda: running.core.ready_links not in ([], [link]))
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_an_unreadable_message_leaves_the_connection_alone_and_another_version_ends_it():
    async with running_gateway() as running:
        (link,) = running.core.ready_links
        running.verifier.behaviour = stall
        running.begin(stream=True)
        await running.until_emitted()
        running.verifier.refuse("unreadable")
        await running.core.remove_lora_async(7)
        assert running.core.ready_links == [link]
        assert len(running.core.sequences) == 1
        running.verifier.refuse("incompatible")
        await eventually(lambda: link.state == "lost")


async def test_the_coordinator_directory_keeps_its_own_membership():
    handle = Mock()
    handle.report.side_effect = [Orders(known=False), Orders(known=True)]
    handle.snapshot.return_value = FleetSnapshot(1, [], [], {})
    member = Member("gateway-0", "gateway", "i", "", "", "node", 1, "demo", "ready")
    directory = Directory(handle, member)
    for _ in range(2):
        assert (await directory.snapshot()).version == 1
    # Asking again says that the first answer has been acted upon.
    reports = [call.report("gateway-0", "i", None, "ready", version) for version in (0, 1)]
    assert handle.mock_calls == [reports[0], call.register(member), call.snapshot(), reports[1], call.snapshot()]


async def reports(running: Running, idle: FakeVerifier, looks: int) -> None:
    """Both verifiers have taken 50 ms for each step over what they run, and the gateway has heard of it."""
    for verifier in (running.verifier, idle):
        placed = running.core.sequences.placed(verifier.name)
        stats = VerifierStats(verifier.name, 1.0, "off", 4, running=placed, prefill_tokens=1000, prefill_s=0.1)
        stats.steps = 10 * looks
        stats.speed = Speed(0.025, 0.025 / max(placed, 1)) if placed else None
        verifier.publish(stats)
    links = running.core.ready_links
    await eventually(lambda: all(link.stats and link.stats.steps == 10 * looks for link in links))


async def test_requests_move_to_a_faster_verifier_unless_they_were_just_placed(monkeypatch):
    plans: list[Any] = []

    def planned(*given: Any) -> Any:
        plans.append(balance.plan_moves(*given))
        return plans[-1]

    for module, name, value in ((balance, "MOVES", 2), (balance, "DWELL_S", 1000.0), (balancing, "INTERVAL_S", 0.02)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(balancing, "plan_moves", planned)
    async with running_gateway() as running:
        running.verifier.behaviour = stall
        for _ in range(6):
            running.begin(stream=True, max_tokens=200)
        await running.until_emitted(6)
        idle = running.another("idle")
        idle.behaviour = stall
        running.directory.set_members([running.verifier.member, idle.member])
        await eventually(lambda: len(running.core.ready_links) == 2)
        looks = 0
        while not idle.sequences:
            looks += 1
            await reports(running, idle, looks)
            await eventually(partial(lambda made: len(plans) > made, len(plans)))
            if looks == 9:
                monkeypatch.setattr(balance, "DWELL_S", 0.0)
        assert looks >= 9
        assert await running.metric("outrider_migrations_total", cause="balance") >= 1
