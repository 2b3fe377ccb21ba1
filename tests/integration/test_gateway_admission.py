"""Requests beyond what verifiers run wait at the gateway: in which order, how long, and who is turned away."""

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial

import pytest

from gateway.http.sse import KEEP_ALIVE_S
from tests.support.fake_verifier import eventually, gated
from tests.support.running_gateway import Keys, refusal, running_gateway

SLOTS = 2
ROOM = SLOTS + 1
"""One more waits at the verifier."""


def ask(running, name, headers=None, **fields):
    return running.begin(headers=headers, prompt=name, **fields)


@asynccontextmanager
async def filled(headers=None, **settings):
    async with running_gateway(slots=SLOTS, **settings) as running:
        full = Filled(running)
        await full.fill(headers)
        yield running, full


class Filled:
    """A gateway whose verifier is full, and takes one more whenever a test says so."""

    def __init__(self, running):
        self.running = running
        self.gates = []
        self.requests = []

    async def fill(self, headers=None):
        async def behaviour(verifier, sequence):
            gate = asyncio.Event()
            self.gates.append(gate)
            await gated(gate)(verifier, sequence)

        self.running.verifier.behaviour = behaviour
        self.requests += [ask(self.running, "a", headers) for _ in range(ROOM)]
        await eventually(lambda: len(self.gates) == ROOM)

    def release(self, count=1):
        for gate in [each for each in self.gates if not each.is_set()][:count]:
            gate.set()

    async def finish(self):
        while not all(each.done() for each in self.requests):
            self.release()
            await asyncio.sleep(0.01)
        return [(await each).status_code for each in self.requests]

    async def queue(self, count):
        await eventually(lambda: self.running.core.gate.sequences == count)


async def test_more_wait_until_there_is_room_and_nobody_waits_while_there_is():
    async with filled() as (running, full):
        full.requests += [ask(running, "b"), ask(running, "c", n=2)]
        await full.queue(3)
        assert len(running.verifier.sequences) == ROOM
        full.release()
        await eventually(lambda: len(running.verifier.sequences) == ROOM + 1)
        await full.queue(2)
        full.release()
        # Both sequences of the last one come together.
        await eventually(lambda: len(running.verifier.sequences) == ROOM + 3)
        assert await full.finish() == [200] * 5
        await eventually(lambda: running.idle)
        assert (running.core.gate.sequences, running.core.gate.tokens) == (0, 0)
        # All of the room is there again.
        full.gates.clear()
        await full.fill()
        assert await full.finish() == [200] * (5 + ROOM)


async def test_keys_share_and_priorities_go_first(tmp_path):
    keys, lengths = Keys(tmp_path), {"flood": 10, "light": 11, "batch": 20, "vip": 40}
    more = {"batch": {"priority": "batch"}, "vip": {"priority": "high"}}
    headers = {name: keys.put(name, **more.get(name, {})) for name in lengths}
    async with filled(headers["flood"], keys_file=str(keys.file)) as (running, full):
        for number, name in enumerate(["flood"] * 4 + ["batch", "light", "vip"], 1):
            full.requests.append(ask(running, [5] * lengths[name], headers[name]))
            await full.queue(number)
        while (seen := len(full.gates)) < len(full.requests):
            full.release()
            await eventually(partial(lambda seen: len(full.gates) > seen, seen))
        assert await full.finish() == [200] * len(full.requests)
        first, second, third, *_, last = [len(each.request.prompt_token_ids) for each in running.verifier.sequences[ROOM:]]
        assert (first, last) == (40, 20)
        assert 11 in (second, third)


async def test_who_would_wait_too_long_or_finds_it_full_is_told_when_to_come_again():
    async with filled() as (running, full):
        running.core.gate.limit(2, 60.0)
        for stream in (False, True):
            late = await ask(running, "b", {"x-outrider-max-wait-s": "0"}, stream=stream)
            assert refusal(late) == (503, "overloaded"), stream
            assert 1 <= int(late.headers["retry-after"]) <= 60
        assert refusal(await ask(running, "b", {"x-outrider-max-wait-s": "0.05"})) == (503, "overloaded")
        full.requests += [ask(running, "c"), ask(running, "d")]
        await full.queue(2)
        assert refusal(await ask(running, "e")) == (503, "overloaded")
        assert refusal(await ask(running, "e", {"x-outrider-max-wait-s": "soon"})) == (400, "x-outrider-max-wait-s")
        now = {"x-outrider-max-wait-s": "0"}
        for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
            for stream in (False, True):
                answer = await running.begin(path, now, stream=stream)
                assert answer.status_code == 503, (path, stream, answer.text)
                assert int(answer.headers["retry-after"]) >= 1
        assert refusal(await ask(running, ["a", "b", "c"], now)) == (503, "overloaded")
        assert len(running.verifier.sequences) == ROOM, "nothing of these was computed"
        assert running.core.gate.shed == 4 + 6 + 1
        assert await full.finish() == [200] * 5


@pytest.mark.parametrize(("path", "request_ids"), [("/abort_requests", ["b"]), ("/abort_requests", None), ("/pause", None)])
async def test_those_who_wait_are_aborted_with_nothing_generated(path, request_ids):
    async with filled() as (running, full):
        waiting = [ask(running, "b", request_id="b", n=2, outrider={"stats": True}), ask(running, "c", stream=True)]
        await full.queue(3)
        other = await running.http.post("/abort_requests", json={"request_ids": ["cmpl-b-3"]})
        assert other.json()["aborted"] == 0
        answer = await running.http.post(path, json={"request_ids": request_ids})
        aborted, streamed = (await waiting[0]).json(), waiting[1]
        assert [(each["text"], each["finish_reason"]) for each in aborted["choices"]] == [("", "abort")] * 2
        assert aborted["usage"]["completion_tokens"] == 0
        if request_ids:
            assert answer.json() == {"status": "aborted", "aborted": 1, "token_ids": {"b": [[], []]}}
            assert not streamed.done()
            full.requests.append(streamed)
        else:
            last, end = (await streamed).text.removesuffix("\n\n").split("\n\n")
            (choice,) = json.loads(last.removeprefix("data: "))["choices"]
            assert (choice["text"], choice["finish_reason"], end) == ("", "abort", "data: [DONE]")
        assert await full.finish() == [200] * len(full.requests)
        await eventually(lambda: running.idle)
        assert (running.core.gate.sequences, running.core.gate.tokens) == (0, 0)
        assert len(running.verifier.sequences) == len(full.requests)


async def test_streams_get_comments_while_they_wait_and_an_error_at_the_end_of_it(elapse):
    async with filled() as (running, full):
        request = ask(running, "b", {"x-outrider-max-wait-s": "50"}, stream=True)
        await full.queue(1)
        for seconds in (KEEP_ALIVE_S, KEEP_ALIVE_S, 50 - 2 * KEEP_ALIVE_S):
            await elapse(seconds)
        late = await request
        assert late.text.startswith(": keep-alive\n: keep-alive\n")
        assert '"overloaded"' in late.text
        assert late.text.endswith("data: [DONE]\n\n")
        assert await full.finish() == [200] * ROOM


async def test_those_who_wait_are_told_when_the_gateway_stops():
    async with filled(drain_s=0) as (running, full):
        waiting = ask(running, "b")
        await full.queue(1)
        running.server.stop()
        assert (await waiting).json()["error"]["code"] == "shutting_down"
        await asyncio.gather(*full.requests)


async def test_those_who_wait_go_on_at_another_verifier():
    async with running_gateway(verifiers=2, slots=1) as running:
        gate = asyncio.Event()
        for each in running.verifiers:
            each.behaviour = gated(gate)
        requests = [ask(running, "a") for _ in range(6)]
        await eventually(lambda: running.core.gate.sequences == 2)
        running.verifiers[0].kill()
        gate.set()
        assert [(await each).status_code for each in requests] == [200] * 6
