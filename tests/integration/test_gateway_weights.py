"""What a trainer asks of the fleet, in front of fake verifiers: pauses that last, updates that fail, several processes."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from backend.fleet.stats import Weights
from backend.wire.engine import NOT_BEGUN
from gateway.fleet.pauses import Change, Pauses
from gateway.fleet.weights import WeightsInForce
from gateway.http.server import peer_calls
from gateway.peers import Peers
from tests.support.fake_verifier import FakeVerifier, eventually, stall
from tests.support.running_gateway import Running, running_gateway

PAUSED = ("pause", ["keep", False])


async def post(running: Running, path: str, status: int = 200, **options: Any) -> Any:
    answer = await running.http.post(path, **options)
    assert answer.status_code == status, answer.text
    return answer.json()


def routable(running: Running) -> list[str]:
    return sorted(link.member.id for link in running.core.routable_links())


async def restarted(running: Running, number: int) -> FakeVerifier:
    """A verifier is killed, and another one of its name is there."""
    old = running.verifiers[number]
    old.kill()
    running.directory.set_members([each.member for each in running.verifiers if each is not old])
    await eventually(lambda: old.name not in running.core.links)
    new = running.another(old.name)
    running.verifiers[number] = running.verifiers.pop()
    running.directory.set_members([each.member for each in running.verifiers])
    await eventually(lambda: old.name in [link.member.id for link in running.core.ready_links])
    return new


async def test_a_verifier_that_comes_during_a_pause_is_paused_before_it_gets_requests():
    async with running_gateway(verifiers=2) as running:
        await post(running, "/pause", params={"verifier": "verifier-1", "mode": "keep"})
        assert routable(running) == ["verifier-0"]
        assert (await restarted(running, 0)).utilities == []
        new = await restarted(running, 1)
        await eventually(lambda: new.utilities == [PAUSED])
        await post(running, "/resume", params={"verifier": "verifier-1"})
        assert routable(running) == ["verifier-0", "verifier-1"]
        await post(running, "/pause")
        for each in running.verifiers:
            each.send_stats(paused=True)
        await eventually(lambda: all(link.stats is not None and link.stats.paused for link in running.core.ready_links))
        new = await restarted(running, 0)
        assert routable(running) == ["verifier-0", "verifier-1"], "it is not preferred to those that stand still"
        await eventually(lambda: new.utilities == [PAUSED])
        await post(running, "/resume")
        assert [method for method, _ in new.utilities] == ["pause", "resume"]
        assert (await restarted(running, 0)).utilities == []


async def test_a_verifier_that_was_away_when_the_pause_ended_goes_on():
    async with running_gateway(verifiers=2) as running:
        await post(running, "/pause", params={"mode": "keep"})
        away = running.verifiers[0]
        running.core.links[away.name].close("declared_lost", died=True)
        running.directory.set_members([running.verifiers[1].member])
        await post(running, "/resume")
        assert [method for method, _ in away.utilities] == ["pause"]
        running.directory.set_members([each.member for each in running.verifiers])
        await eventually(lambda: [method for method, _ in away.utilities] == ["pause", "wake_up"])
        assert [method for method, _ in running.verifiers[1].utilities] == ["pause", "resume"]


async def test_a_sleep_is_a_pause_unless_it_is_refused(running: Running):
    before = running.core.pauses
    assert (await post(running, "/pause", 400, params={"mode": "never"}))["error"]["param"] == "mode"
    for level in (-1, 3, 1 << 70):
        assert (await post(running, "/sleep", 400, params={"level": level}))["error"]["param"] == "level"
    for nobody in ("nobody", ""):
        await post(running, "/pause", 404, params={"verifier": nobody})
    assert running.core.pauses == before
    running.verifier.failure = "NotImplementedError: it cannot"
    assert (await post(running, "/sleep", 501))["error"]["code"] == "not_supported"
    assert not running.core.pauses.should_pause("verifier-0")
    running.verifier.failure = None
    await post(running, "/sleep")
    assert running.core.pauses.should_pause("verifier-0")
    running.verifier.failure = "ValueError: not now"
    await post(running, "/wake_up", 400)
    await post(running, "/resume", 400)
    assert running.core.pauses.should_pause("verifier-0")
    running.verifier.failure = None
    await post(running, "/wake_up")
    assert not running.core.pauses.should_pause("verifier-0")


async def test_when_an_update_has_failed_everywhere_the_fleet_serves_with_what_it_went_back_to():
    async with running_gateway(verifiers=2) as running:
        first, second = running.verifiers

        async def run(verifier: FakeVerifier, weights: Weights, serving: list[str]) -> None:
            verifier.weights = weights
            verifier.send_stats()
            await eventually(lambda: routable(running) == serving)

        tensors = Weights(1, "one")
        await run(first, tensors, ["verifier-0"])
        await run(second, tensors, ["verifier-0", "verifier-1"])
        await run(first, Weights(), ["verifier-1"])
        await run(second, Weights(), ["verifier-0", "verifier-1"])
        assert (await running.http.get("/weight_info")).json()["weight_version"] == "0"
        answer = await post(running, "/finish_weight_update")
        assert answer["weight_version"] == "2", "no number is used twice"
        # So it is for one that was lost for a moment meanwhile.
        await run(first, tensors, ["verifier-0"])
        await run(second, tensors, ["verifier-0", "verifier-1"])
        await run(second, Weights(), ["verifier-0"])
        running.core.links["verifier-0"].close("declared_lost", died=True)
        running.directory.set_members([second.member])
        await eventually(lambda: routable(running) == [])
        first.weights = Weights()
        running.directory.set_members([each.member for each in running.verifiers])
        await eventually(lambda: routable(running) == ["verifier-0", "verifier-1"])
        # One that was started anew has not gone back: it may have other weights than those that the trainer wants.
        await run(first, tensors, ["verifier-0"])
        await run(second, tensors, ["verifier-0", "verifier-1"])
        for number in (0, 1):
            await restarted(running, number)
        assert routable(running) == []


async def test_a_verifier_that_dies_during_an_update_is_left_out():
    async with running_gateway(verifiers=2) as running:
        dying, other = running.verifiers
        dying.hung = True
        update = asyncio.ensure_future(post(running, "/update_weights", json={"weight_dir": "/x"}))
        await eventually(lambda: other.weights.path == "/x")
        dying.kill()
        assert (await update)["verifiers"] == {"verifier-1": True}
        other.hung = True
        update = asyncio.ensure_future(post(running, "/update_weights", 503, json={"weight_dir": "/y"}))
        await asyncio.sleep(0)
        other.kill()
        assert (await update)["error"]["code"] in ("verifier_lost", "no_verifier_ready")
        await eventually(lambda: not running.core.ready_links)
        await post(running, "/pause", 503)
        assert not running.core.pauses.should_pause("verifier-0")


async def test_a_verifier_that_could_not_catch_up_at_once_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    """Its weights may sleep, or it may have forgotten the gateway."""
    monkeypatch.setattr("gateway.fleet.weights.RETRY_S", 0.01)
    async with running_gateway(verifiers=2) as running:
        sleeping = running.verifiers[0]
        sleeping.failure = "ValueError: wake the weights up first"
        await post(running, "/update_weights", 500, json={"weight_dir": "/x"})
        await eventually(lambda: routable(running) == ["verifier-1"])
        calls = len(sleeping.utilities)

        def was_asked() -> bool:
            # As four times a second.
            sleeping.send_stats()
            return len(sleeping.utilities) > calls

        await eventually(was_asked)
        assert sleeping.utilities[-1] == ("catch_up", ["/x", "1", 1])
        sleeping.failure, calls = None, len(sleeping.utilities)
        await eventually(was_asked)
        await eventually(lambda: routable(running) == ["verifier-0", "verifier-1"])


async def test_a_verifier_that_comes_during_an_update_is_left_out_and_what_one_has_loaded_is_not_said_to_be_unchanged():
    async with running_gateway(verifiers=2) as running:
        running.verifiers[1].failure = f"ValueError: {NOT_BEGUN}"
        bodies: dict[str, Any] = {"/update_weights": {"update_info": {}}, "/finish_weight_update": {}}
        for path, body in bodies.items():
            assert (await post(running, path, json=body))["verifiers"] == {"verifier-0": True}
        running.verifiers[0].failure = running.verifiers[1].failure
        await post(running, "/update_weights", 400, json={"update_info": {}})
        running.verifiers[1].failure = None
        for path in ("/sleep", "/wake_up"):
            await post(running, path, params={"verifier": "verifier-1", "level": 0})
        assert running.verifiers[0].utilities[-1][0] == "update_weights"
        assert running.verifiers[1].utilities[-2:] == [("sleep", [0, "abort"]), ("wake_up", [None])]
        running.verifiers[0].failure = "ValueError: no such directory on the verifier's machine"
        await post(running, "/update_weights", 500, json={"weight_dir": "/nowhere"})
        running.verifiers[0].failure = "RuntimeError: torn"
        assert (await post(running, "/wake_up", 500))["error"]["code"] == "engine_error"


async def test_a_call_to_a_verifier_that_has_forgotten_the_gateway_may_be_made_again(running: Running):
    running.verifier.holds = True
    call = asyncio.ensure_future(post(running, "/resume", 503))
    await eventually(lambda: running.verifier.utilities != [])
    running.verifier.refuse("unknown")
    running.verifier.holds = False
    assert (await call)["error"]["code"] == "verifier_lost"
    await eventually(lambda: running.core.ready_links != [])
    await post(running, "/resume")


async def test_what_vllms_transfer_engine_is_to_receive_reaches_every_verifier():
    """Of a trainer's group each has ranks of its own.  SkyRL's body, and the one with an entry per rank."""
    async with running_gateway(verifiers=2) as running:

        def received() -> list[Any]:
            return [verifier.utilities[-1][1][0] for verifier in running.verifiers]

        group = {"master_address": "trainer", "master_port": 1, "rank_offset": 1, "world_size": 3}
        await post(running, "/init_weight_transfer_engine", json={"init_info": group})
        assert sorted(each["rank_offset"] for each in received()) == [1, 2]
        assert all(each | {"rank_offset": 1} == group for each in received())
        await post(running, "/init_weight_transfer_engine", json={"init_info": group}, params={"verifier": "verifier-1"})
        assert received()[1] == group
        info: dict[str, Any] = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "packed": True}
        for body in (info, [info, info]):
            await post(running, "/update_weights", json={"update_info": body})
            assert received() == [body, body]
        await post(running, "/update_weights", 400, json={"update_info": "x"})


async def test_requests_of_one_verifier_are_aborted():
    async with running_gateway(verifiers=2) as running:
        for each in running.verifiers:
            each.behaviour = stall
        requests = [running.begin() for _ in range(2)]
        await eventually(lambda: [len(each.sequences) for each in running.verifiers] == [1, 1])
        await post(running, "/abort_requests", 404, json={}, params={"verifier": "nobody"})
        assert (await post(running, "/abort_requests", json={}, params={"verifier": "verifier-1"}))["aborted"] == 1
        await running.verifiers[1].sequences[0].aborted.wait()
        assert not running.verifiers[0].sequences[0].aborted.is_set()
        assert (await post(running, "/abort_requests", json={}))["aborted"] == 1
        await asyncio.gather(*requests)


async def test_processes_of_one_port_share_pauses_and_the_numbers_of_updates(tmp_path: Path):
    cores = [SimpleNamespace(weights=WeightsInForce(), pauses=Pauses()) for _ in range(2)]
    peers = [Peers(tmp_path, number, 2) for number in range(2)]
    try:
        for each, core in zip(peers, cores, strict=True):
            await each.start(peer_calls(Mock(client=Mock(core=core))), 0)
        # None of them hears of the others' updates meanwhile.
        assert [await peers[each].ask_first("update_number") for each in (0, 1, 1, 0)] == [1, 2, 3, 4]
        paused = Pauses((Change(None, True), Change("verifier-1", False)))
        await peers[1].tell("", "hear_of_pauses", msgspec.to_builtins(paused))
        assert cores[0].pauses == paused
        assert msgspec.convert((await peers[1].ask("pauses"))[0], Pauses) == paused
    finally:
        for each in peers:
            await each.close(1.0)


async def test_verifiers_read_an_adapter_once_however_many_processes_there_are(tmp_path: Path):
    """Another reading in its place would discard what they have cached, and stop them meanwhile."""
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(running_gateway(peers=Peers(tmp_path, number, 2), adapters_loadable=True))
            for number in range(2)
        ]
        loaded = {"lora_name": "sql", "lora_path": "/adapters/sql", "is_3d_lora_weight": True}
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            await post(processes[0], path, json=loaded)
        first, second = (each.server.gateway.services.models.lora_requests for each in processes)
        assert second == first
        assert second["sql"].is_3d_lora_weight
        assert ([name for name, _ in processes[0].verifier.utilities], processes[1].verifier.utilities) == (
            ["add_lora"] * 2,
            [],
        )
        processes[1].server.gateway.services.models.lora_requests.clear()
        # As a process that is started asks.
        (answer,) = (await processes[1].server.gateway.peers.ask("adapters")).values()
        processes[1].server.gateway.take_adapters(answer)
        assert second == first
