"""What becomes of requests whose verifier is lost, hangs, forgets them, or is relieved of them: fake verifiers, real HTTP."""

from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import FinishReason

from tests.support.fake_verifier import count_up, eventually, silence, stalling
from tests.support.running_gateway import COMPLETION, Running, events, refusal, running_gateway

STREAM: dict[str, Any] = {"stream": True, "max_tokens": 12, "stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True)
def never_starved(monkeypatch):
    """A gateway that was starved blames no request; the loop of these tests, where others run beside them, may be."""
    monkeypatch.setattr("gateway.fleet.engine_link.STALL_S", 60.0)


def has_emitted(running: Running, tokens: int) -> bool:
    return [len(record.emitted) for record in running.core.sequences] == [tokens]


@asynccontextmanager
async def two_with_a_stream(emitted=4):
    """Two verifiers, and a request that has emitted a few tokens at one of them; yields (running, its verifier, the other one,
    the request)."""
    async with running_gateway(verifiers=2) as running:
        for verifier in running.verifiers:
            verifier.behaviour = stalling(emitted)
        request = running.begin(**STREAM)
        await eventually(lambda: has_emitted(running, emitted) and any(each.sequences for each in running.verifiers))
        first, second = sorted(running.verifiers, key=lambda each: len(each.sequences), reverse=True)
        for verifier in running.verifiers:
            verifier.behaviour = count_up
        yield running, first, second, request


async def heard(request) -> tuple[str, dict[str, Any]]:
    """A stream's text and usage."""
    chunks = events((await request).content)
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), chunks[-1]["usage"]


async def is_undisturbed(running: Running, request) -> None:
    """Its client hears what it would hear of a verifier that nothing happens to."""
    assert await heard(request) == await heard(running.begin(**STREAM))


@pytest.mark.parametrize("emitted", [0, 4])
async def test_a_killed_verifier_is_not_noticed(emitted):
    async with two_with_a_stream(emitted) as (running, first, second, request):
        first.kill()
        await is_undisturbed(running, request)
        resumed = second.sequences[0]
        assert resumed.emitted == [300, 301, 302, 303][:emitted]
        assert resumed.request_id != resumed.request.request_id, "late outputs of the first place are told apart"
        assert await running.metric("outrider_failovers_total", cause="disconnected") == 1
        assert await running.metric("outrider_recovery_seconds_count", kind="failover") == 1
        moved = {"kind": "failover", "cause": "disconnected", "verifier": second.name, "sequences": 1}
        assert (await running.http.get("/fleet")).json()["moved"] == [moved]
        assert running.idle


async def test_a_hung_verifier_is_given_up(monkeypatch):
    monkeypatch.setattr("gateway.fleet.engine_link.PING_INTERVAL_S", 0.05)
    async with two_with_a_stream() as (running, first, _second, request):
        running.core.links[first.name]._silence_limit_s = 0.5
        first.hung = True
        assert (await heard(request))[1]["completion_tokens"] == 12
        assert await running.metric("outrider_failovers_total", cause="silent") == 1
        # It wakes up again: what still runs there is ended, and what it still emits is nobody's.
        first.hung = False
        first.sequences[0].emit([1, 2, 3], FinishReason.LENGTH)
        await first.sequences[0].aborted.wait()


async def test_it_does_not_wait_for_ever_nor_after_the_client_has_gone(elapse):
    async with running_gateway(queue_wait_s=40) as running:
        running.verifier.behaviour = stalling(2)
        requests = [running.begin(**STREAM) for _ in range(2)]
        await running.until_emitted(2)
        requests[0].cancel()
        running.verifier.kill()
        await eventually(lambda: len(running.core.sequences.waiting()) == 1)
        await elapse(40)
        assert events((await requests[1]).content)[-1]["error"]["code"] == "verifier_lost"
        assert running.idle


async def test_a_request_that_kills_verifiers_is_refused_and_spares_the_third():
    async def die(verifier, sequence):
        sequence.emit([300 + len(sequence.emitted)])
        verifier.kill()

    async with running_gateway(verifiers=3) as running:
        for verifier in running.verifiers:
            verifier.behaviour = die
        response = await running.http.post("/v1/completions", json={**COMPLETION, "max_tokens": 9})
        assert refusal(response) == (500, "request_poisoned")
        assert response.headers["x-should-retry"] == "false"
        assert sorted(len(verifier.sequences) for verifier in running.verifiers) == [0, 1, 1]
        assert await running.metric("outrider_poisoned_total") == 1
        assert running.idle


async def test_a_verifier_that_gives_up_on_a_request_is_not_asked_for_ever(running: Running):
    async def give_up(verifier, sequence):
        sequence.emit([], FinishReason.ABORT)

    running.verifier.behaviour = give_up
    response = await running.http.post("/v1/completions", json=COMPLETION)
    assert response.json()["error"]["code"] == "request_poisoned"
    assert len(running.verifier.sequences) == 2


async def test_verifiers_that_die_together_are_no_reason_to_blame_a_request():
    async with two_with_a_stream() as (running, first, second, request):
        # The second one is dead already when the request comes to it, and the gateway does not know.
        second.takes, second.behaviour = False, silence
        first.kill()
        await eventually(lambda: second.sequences != [])
        second.kill()
        await eventually(lambda: len(running.core.sequences.waiting()) == 1)
        assert await running.metric("outrider_sequences_without_verifier") == 1
        running.directory.set_members([running.another(first.name).member])
        await is_undisturbed(running, request)


async def test_a_verifier_that_forgot_us_is_greeted_again_and_the_request_goes_on():
    async with running_gateway() as running:
        (link,) = running.core.ready_links
        running.verifier.behaviour = stalling(4)
        request = running.begin(**STREAM)
        await running.until_emitted()
        running.verifier.behaviour = count_up
        for _ in range(2):
            running.verifier.refuse("unknown")
        await is_undisturbed(running, request)
        assert running.core.ready_links == [link]
        assert not running.core.sequences
        assert await running.metric("outrider_failovers_total", cause="forgotten") == 1


@pytest.mark.parametrize("named", [True, False])
async def test_a_migrated_request_leaves_one_verifier_and_goes_on_at_the_other(named):
    async with two_with_a_stream() as (running, first, second, request):
        records = list(running.core.sequences)
        assert running.core.migrate(records, first.name, "test") == 0, "it is there already"
        assert running.core.migrate(records, second.name if named else None, "test") == 1
        # What the first one emits after the cut must not reach the client: not late, not twice.
        first.sequences[0].emit([304, 305, 306])
        await is_undisturbed(running, request)
        await first.sequences[0].aborted.wait()
        assert await running.metric("outrider_migrations_total", cause="test") == 1
        assert await running.metric("outrider_recovery_seconds_count", kind="migration") == 1
        assert running.idle


async def test_a_verifier_with_a_shorter_context_takes_no_request_that_would_outgrow_it():
    async with running_gateway() as running:
        running.verifier.behaviour = stalling(4)
        request = running.begin(**STREAM | {"max_tokens": 40})
        await running.until_emitted()
        small = running.another("small", max_model_len=32)
        running.directory.set_members([running.verifier.member, small.member])
        await eventually(lambda: len(running.core.ready_links) == 2)
        assert running.core.migrate(list(running.core.sequences), "small", "test") == 0
        running.verifier.sequences[0].emit(list(range(304, 340)), FinishReason.LENGTH)
        assert (await request).status_code == 200


async def stop_for_a_moment(running: Running) -> None:
    """The verifier hears nothing until the coordinator has declared it lost, and its requests wait."""
    running.verifier.hung = True
    running.directory.set_members([msgspec.structs.replace(running.verifier.member, state="lost")])
    await eventually(lambda: not running.core.links)


async def go_on(running: Running) -> None:
    running.verifier.hung = False
    running.directory.set_members([running.verifier.member])
    await eventually(lambda: len(running.core.ready_links) == 1)


async def test_a_verifier_that_is_stopped_and_comes_back_is_waited_for_but_not_for_long(monkeypatch):
    """A request that ran there is not to blame for it."""
    monkeypatch.setattr("gateway.fleet.verifiers.FRESH_S", 0.05)
    async with running_gateway() as running:
        running.verifier.behaviour = stalling(2)
        request = running.begin(**STREAM)
        for pauses in range(3):
            if pauses:
                await go_on(running)
            await eventually(partial(has_emitted, running, 2 * (pauses + 1)))
            await stop_for_a_moment(running)
        new = [running.begin() for _ in range(3)]
        assert (await running.http.get("/readyz")).status_code == 503
        await eventually(lambda: running.server.gateway.metrics.in_flight == 4)
        assert not any(each.done() for each in new)
        running.verifier.behaviour = count_up
        await go_on(running)
        assert (await heard(request))[1]["completion_tokens"] == 12
        assert [(await each).status_code for each in new] == [200, 200, 200]
        assert await running.metric("outrider_poisoned_total") == 0
        monkeypatch.setattr("gateway.fleet.verifiers.HOLD_S", 0.3)
        await stop_for_a_moment(running)
        for _ in range(2):
            refused = await running.http.post("/v1/completions", json=COMPLETION)
            assert refusal(refused) == (503, "no_verifier_ready")
            assert int(refused.headers["retry-after"]) >= 1
        assert running.idle


@pytest.mark.parametrize("after", ["until_routable", "admit", "get_supported_tasks_async"])
async def test_so_does_a_request_wait_that_is_being_prepared_when_the_verifier_is_lost(monkeypatch, after):
    monkeypatch.setattr("gateway.fleet.verifiers.FRESH_S", 0.05)
    async with running_gateway() as running:
        let_through, waits = getattr(running.core, after), running.core.wait_routable
        waiting = []

        async def lost_then(*args):
            result = await let_through(*args)
            monkeypatch.setattr(running.core, after, let_through)
            monkeypatch.setattr(running.core, "wait_routable", noted)
            await stop_for_a_moment(running)
            return result

        async def noted(patience_s):
            waiting.append(patience_s)
            await waits(patience_s)

        monkeypatch.setattr(running.core, after, lost_then)
        request = running.begin()
        await eventually(lambda: bool(waiting) or request.done())
        assert not request.done()
        await go_on(running)
        assert (await request).status_code == 200
