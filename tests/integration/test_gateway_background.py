"""OpenAI's responses in the background, in front of a fake verifier: made, followed, cancelled, charged, left behind."""

import asyncio
import json
import sqlite3

import pytest

from gateway.http.errors import Overloaded
from tests.integration.test_gateway_responses import ended
from tests.support.fake_verifier import FakeVerifier, Sequence, eventually, gated, saying, silence
from tests.support.running_gateway import Keys, running_gateway


@pytest.fixture
def running(running):
    running.verifier.behaviour = saying("def f(x):")
    return running


async def test_in_the_background(running):
    responses = running.client.responses
    begun = await responses.create(model="demo", input="hi", background=True)
    assert begun.status == "queued"
    made = await ended(responses, begun)
    assert (made.status, made.output_text, made.background) == ("completed", "def f(x):", True)
    assert (await responses.cancel(made.id)).status == "completed"
    waiting = await responses.create(model="demo", input="and then", previous_response_id=made.id, background=True)
    assert (await ended(responses, waiting)).status == "completed"


async def test_a_stream_in_the_background_can_be_taken_up_again(running, monkeypatch, caplog):
    responses = running.client.responses
    events = [event async for event in await responses.create(model="demo", input="hi", background=True, stream=True)]
    before = await running.metric("outrider_client_disconnects_total")
    again = [event async for event in await responses.retrieve(events[0].response.id, stream=True, starting_after=3)]
    assert [event.sequence_number for event in again] == [event.sequence_number for event in events[4:]]
    assert again[-1].response.output_text == "def f(x):"
    assert await running.metric("outrider_client_disconnects_total") == before, "whose stream has ended has not left"

    async def fail(response_id, after):
        yield json.dumps({"type": "response.created"})
        raise sqlite3.OperationalError("secret")

    monkeypatch.setattr(running.server.gateway.responses, "follow", fail)
    text = (await running.http.get(f"/v1/responses/{events[0].response.id}?stream=true")).text
    assert "event: error\ndata: " in text
    assert "secret" not in text
    assert "OperationalError" in caplog.text


async def test_cancelling_aborts_at_the_verifier(running):
    running.verifier.behaviour = silence
    responses = running.client.responses
    begun = await responses.create(model="demo", input="hi", background=True)
    await eventually(lambda: bool(running.verifier.sequences))
    before = await running.metric("outrider_client_disconnects_total")
    async with running.http.stream("GET", f"/v1/responses/{begun.id}?stream=true") as followed:
        await anext(followed.aiter_raw())
    while await running.metric("outrider_client_disconnects_total") == before:
        await asyncio.sleep(0.01)
    assert (await responses.cancel(begun.id)).status == "cancelled"
    await asyncio.wait_for(running.verifier.sequences[0].aborted.wait(), 120)
    assert (await responses.retrieve(begun.id)).status == "cancelled"


async def test_any_gateway_of_the_same_folder_cancels(tmp_path):
    async def endless(verifier: FakeVerifier, sequence: Sequence) -> None:
        while not sequence.aborted.is_set():
            sequence.emit([5])
            await asyncio.sleep(0.01)

    async with running_gateway(state_dir=str(tmp_path)) as first, running_gateway(state_dir=str(tmp_path)) as second:
        first.verifier.behaviour = endless
        begun = await first.client.responses.create(model="demo", input="hi", background=True)
        await eventually(lambda: bool(first.verifier.sequences))
        assert (await second.client.responses.cancel(begun.id)).status == "cancelled"
        await asyncio.wait_for(first.verifier.sequences[0].aborted.wait(), 120)
        assert (await first.client.responses.retrieve(begun.id)).status == "cancelled"


async def test_what_is_made_in_the_background_is_charged_from_the_start(tmp_path):
    keys = Keys(tmp_path)
    mine = keys.put("mine", tokens_per_minute=300)
    ask = {"model": "demo", "input": "hi", "background": True, "max_output_tokens": 200}
    async with running_gateway(keys_file=str(keys.file), state_dir=str(tmp_path)) as running:
        gate = asyncio.Event()
        running.verifier.behaviour = gated(gate)
        assert (await running.http.post("/v1/responses", json=ask, headers=mine)).status_code == 200
        assert (await running.http.post("/v1/responses", json=ask, headers=mine)).status_code == 429
        gate.set()
        await eventually(lambda: not running.core.sequences)

        async def left():
            return int((await running.http.get("/v1/models", headers=mine)).headers["x-ratelimit-remaining-tokens"])

        while await left() < 200:
            await asyncio.sleep(0.01)


async def test_a_background_stream_that_fails_at_once_says_so(running, monkeypatch):
    async def fail(*args, **kwargs):
        raise Overloaded

    monkeypatch.setattr(running.core.gate, "enter", fail)
    responses = running.client.responses
    events = [event async for event in await responses.create(model="demo", input="x", background=True, stream=True)]
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    again = await responses.retrieve(events[0].response.id)
    assert (again.status, again.error.code) == ("failed", "server_error")
