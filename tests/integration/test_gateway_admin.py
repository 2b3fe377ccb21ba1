"""/admin over HTTP, in front of fake verifiers: who may call, what is answered, and what draining does to requests."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import httpx
import msgspec
import pytest

from backend.coordinator import CoordinatorUnavailable
from backend.coordinator.commands import Answer, Assign, CommandRefused, Done, Drain
from backend.fleet import Draining, FleetSnapshot, Operation
from gateway.auth.access import FORWARDED
from gateway.fleet.directory import Directory
from tests.support.fake_verifier import count_up, eventually, stall
from tests.support.running_gateway import COMPLETION, Running, events, refusal, running_gateway

DONE = Done(8, ["done"])


def coordinator(running: Running, answer: Answer = DONE) -> AsyncMock:
    """Answers every command of the test with this."""
    running.directory.submit = submit = AsyncMock(return_value=answer)  # type: ignore[method-assign]
    return submit


async def post(running: Running, name: str, body: Any = None, **headers: str) -> httpx.Response:
    return await running.http.post(f"/admin/{name}", json=body or {}, headers=headers)


async def test_commands_reach_the_coordinator_and_its_answers_the_client(running: Running):
    submit = coordinator(running)
    answer = await post(running, "drain", {"member": "verifier-0", "deadline_s": 2.5, "if_version": 7, "dry_run": True})
    assert answer.status_code == 200
    assert answer.json() == {"version": 8, "dry_run": True, "effects": ["done"], "operation": None}
    submit.return_value = Done(9, ["later"], 4)
    answer = await post(running, "assign", {"drafter": "d", "verifiers": ["v"]})
    assert (answer.status_code, answer.json()["operation"]) == (202, 4)
    await post(running, "assign", {"drafter": "d", "auto": True})
    assert submit.mock_calls == [
        call(Drain(member="verifier-0", deadline_s=2.5, if_version=7, dry_run=True)),
        call(Assign(drafter="d", verifiers=["v"])),
        call(Assign(drafter="d", verifiers=None)),
    ]


@pytest.mark.parametrize(
    ("reason", "status"),
    [("invalid", 400), ("unknown_member", 404), ("version_mismatch", 409), ("conflict", 409), ("last_verifier", 409)],
)
async def test_refusals_say_why(running: Running, reason: Any, status: int):
    coordinator(running, CommandRefused(reason, "it is so", 3))
    answer = await post(running, "drain", {"member": "x"})
    assert refusal(answer) == (status, reason)
    assert answer.json()["error"]["message"] == "It is so."
    # Official clients repeat a 409 of themselves.
    assert (answer.headers.get("x-should-retry") == "false") == (status == 409)


async def test_nonsense_is_refused_before_it_reaches_the_coordinator(running: Running):
    submit = coordinator(running)
    for name, body, status in [
        ("fly", {}, 404),
        ("drain", {}, 400),
        ("drain", {"member": 5}, 400),
        ("drain", {"member": "v", "sped": 1}, 400),
        ("drain", {"member": "v", "command": "remove"}, 400),
        # A drafter is given back only if that is asked for.
        ("assign", {"drafter": "d"}, 400),
        ("assign", {"drafter": "d", "verifiers": None}, 400),
        ("assign", {"drafter": "d", "auto": False}, 400),
        ("assign", {"drafter": "d", "auto": True, "verifiers": ["v"]}, 400),
        ("assign", {"drafter": "d", "auto": "yes"}, 400),
    ]:
        answer = await post(running, name, body)
        assert (answer.status_code, "error" in answer.json()) == (status, True), (name, body)
    assert (await running.http.get("/admin/drain")).status_code == 405
    for headers in ({}, {"content-type": "text/plain"}):
        answer = await running.http.post("/admin/drain", content=b"{}", headers=headers)
        assert refusal(answer) == (415, "unsupported_media_type")
    submit.assert_not_called()


async def test_without_an_admin_key_only_this_machine_administers(monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with running_gateway(api_key="api") as running:
        coordinator(running)
        port = running.server.url.rpartition(":")[2]
        key = {"authorization": "Bearer api"}
        assert (await post(running, "resume", {"member": "v"})).status_code == 401
        for name in (f"localhost:{port}", "localhost", f"[::1]:{port}", "127.0.0.1"):
            assert (await post(running, "resume", {"member": "v"}, **key, host=name)).status_code == 200, name
        # Called by a name of somebody else's that leads here, or by a nameless one; passed on by a proxy on this machine,
        # whatever it says of where a request is from.
        names = (f"evil.example:{port}", "10.0.0.1", "", "localhost.evil.example", "[::1")
        for headers in (*({"host": name} for name in names), *({name: "127.0.0.1, 10.0.0.1"} for name in sorted(FORWARDED))):
            assert refusal(await post(running, "resume", {"member": "v"}, **key, **headers)) == (403, "forbidden"), headers


async def test_operations_are_shown(running: Running):
    operation = Operation(4, "restart", ["v0"], "running", "draining v0")

    async def look() -> FleetSnapshot:
        return FleetSnapshot(5, [], [], {}, operations=[operation])

    running.directory.look = look  # type: ignore[method-assign]
    listed = (await running.http.get("/admin/operations")).json()
    assert listed == {"version": 5, "operations": [msgspec.to_builtins(operation)]}
    assert (await running.http.get("/admin/operations/4")).json()["note"] == "draining v0"
    unknown = await running.http.get("/admin/operations/5")
    assert (unknown.status_code, "the coordinator restarted" in unknown.text) == (404, True)


async def test_a_coordinator_that_is_away_is_said_to_be(running: Running):
    away = Mock(submit=Mock(side_effect=CoordinatorUnavailable("gone")))
    running.directory.submit = Directory(away).submit  # type: ignore[method-assign]
    answer = await running.http.post("/admin/drain", json={"member": "v"})
    assert refusal(answer) == (503, "coordinator_unavailable")
    assert "gone" not in answer.text


async def test_a_draining_verifier_gets_no_new_requests_and_its_own_finish_or_move():
    async with running_gateway(verifiers=2) as running:
        first, second = running.verifiers
        first.behaviour, second.behaviour = stall, stall
        requests = [running.begin(stream=True) for _ in range(2)]
        await running.until_emitted(2)
        assert len(first.sequences) == len(second.sequences) == 1

        ordinary, drain = running.directory.snapshot, Draining(migrate=False)

        async def drained() -> FleetSnapshot:
            whole = await ordinary()
            leaving = msgspec.structs.replace(whole.members[0].member, state="draining")
            view = msgspec.structs.replace(whole.members[0], member=leaving, drain=drain)
            return msgspec.structs.replace(whole, members=[view, *whole.members[1:]])

        running.directory.snapshot = drained  # type: ignore[method-assign]
        await eventually(lambda: [link.member.id for link in running.core.routable_links()] == ["verifier-1"])
        second.behaviour = count_up
        for _ in range(3):
            assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert len(first.sequences) == 1
        assert not first.sequences[0].aborted.is_set()
        drain = Draining(migrate=True)
        await asyncio.wait_for(first.sequences[0].aborted.wait(), 120)
        moved = await next(done for done in asyncio.as_completed(requests))
        assert events(moved.content)[-1]["choices"][0]["finish_reason"] == "length"
