"""Streams: their bytes, their errors, their ends.  A fake verifier emits; the official client and raw sockets read."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from backend.wire.engine import OUTPUTS
from gateway.admission.claim import Claim
from gateway.http.sse import CHAT as CHAT_EVENTS
from gateway.http.sse import KEEP_ALIVE, KEEP_ALIVE_S, EventStream
from tests.support.fake_verifier import eventually, gated, silence, stall
from tests.support.running_gateway import BODIES, CHAT, COMPLETION, RESPONSE, events, heard, running_gateway

LENGTH = FinishReason.LENGTH


async def surplus(verifier, sequence):
    """A step's tokens, and the next step's, as long as nobody ends it."""
    while not sequence.aborted.is_set():
        sequence.emit([300, 301, 302, 303, 304, 305])
        await asyncio.sleep(0.01)


async def surplus_at_the_end(verifier, sequence):
    sequence.emit([300, 301, 302, 303, 304, 305], LENGTH)


async def surplus_behind(verifier, sequence):
    """All of it comes at once, in two parts."""
    outputs = [EngineCoreOutput(sequence.request_id, [300, 301, 302]), EngineCoreOutput(sequence.request_id, [303, 304, 305])]
    outputs[1].finish_reason = LENGTH
    verifier.send(sequence.client, OUTPUTS, *MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs)))


@pytest.mark.parametrize("behaviour", [surplus, surplus_at_the_end, surplus_behind])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_after_a_stop_string_are_neither_shown_nor_charged(running, monkeypatch, caplog, behaviour, stream):
    caplog.set_level(logging.INFO)
    claims = []

    def claim(*args, **kwargs):
        claims.append(Claim(*args, **kwargs))
        return claims[-1]

    monkeypatch.setattr("gateway.auth.access.Claim", claim)
    monkeypatch.setattr("gateway.fleet.statistics.ACCOUNT_WAIT_S", 0.0)
    whole = (await running.http.post("/v1/completions", json=COMPLETION)).json()["choices"][0]["text"]
    before = await running.metric("outrider_generated_tokens_total")
    running.verifier.behaviour = behaviour
    body = {**COMPLETION, "stop": [whole[1:3]], "outrider": {"stats": True}, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await running.http.post("/v1/completions", json=body)
    chunks = events(answer.content) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(each["text"] for each in choices) == whole[: whole.index(whole[1:3])]
    assert choices[-1]["finish_reason"] == "stop"
    usage = chunks[-1]["usage"]
    assert 0 < usage["completion_tokens"] < 3
    assert chunks[-1]["outrider"]["choices"][0]["tokens"] == usage["completion_tokens"]
    if behaviour is surplus:
        await running.verifier.sequences[-1].aborted.wait()
    await eventually(lambda: running.idle and claims[-1].charged_tokens == usage["total_tokens"])
    line = [each.fields for each in caplog.records if each.name == "outrider.access"][-1]
    assert line["output_tokens"] == usage["completion_tokens"]
    assert not claims[-1].running
    assert await running.metric("outrider_generated_tokens_total") == before + usage["completion_tokens"]


PING, KEPT = b'event: ping\ndata: {"type":"ping"}\n\n', b"event: keepalive\n"


@pytest.mark.parametrize(
    ("path", "body", "waiting", "silent"),
    [
        ("/v1/chat/completions", CHAT, b": keep-alive\n", b": keep-alive\n"),
        ("/v1/messages", CHAT, PING, PING),
        ("/v1/responses", RESPONSE, b": keep-alive\n", KEPT),
    ],
)
async def test_a_silent_stream_is_kept_open_by_what_is_no_event_without_data(running, monkeypatch, path, body, waiting, silent):
    monkeypatch.setattr("gateway.http.sse.KEEP_ALIVE_S", 0.05)
    gates = [asyncio.Event(), asyncio.Event()]

    async def behaviour(verifier, sequence):
        await gates[0].wait()
        await gated(gates[1])(verifier, sequence)

    running.verifier.behaviour = behaviour
    seen, begun = b"", None
    async with running.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for part in response.aiter_raw():
            seen += part
            if begun is None and seen.count(waiting) >= 2:
                gates[0].set()
                begun = len(seen)
            if begun is not None and seen.count(silent, begun) >= 3:
                gates[1].set()
    blocks = seen.replace(b": keep-alive\n", b"").split(b"\n\n")
    assert all(b"data: " in block for block in blocks if block)
    assert b"length" in blocks[-3] or b"_stop" in blocks[-2] or b"response.incomplete" in blocks[-2]


async def test_a_client_that_takes_nothing_gets_no_heap_of_comments(elapse):
    async def wait(*_):
        await asyncio.Event().wait()

    client: Any = Mock(receive=wait)
    source: Any = SimpleNamespace(start=wait, close=AsyncMock())
    stream = EventStream(client, source, CHAT_EVENTS)
    for _ in range(3):
        await elapse(KEEP_ALIVE_S)
    assert stream.take() == KEEP_ALIVE
    await stream.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("when", ["before the first token", "between tokens", "without streaming"])
async def test_a_client_that_leaves_aborts_at_the_verifier(running, path, when):
    before = await running.metric("outrider_client_disconnects_total")
    running.verifier.behaviour = stall if when == "between tokens" else silence
    running.begin(path, n=2, stream=when != "without streaming")
    await eventually(lambda: len(running.verifier.sequences) == 2)
    if when == "between tokens":
        await running.until_emitted(2)
    await running.leave()
    await asyncio.gather(*(sequence.aborted.wait() for sequence in running.verifier.sequences))
    await running.until_idle()
    assert await running.metric("outrider_client_disconnects_total") == before + 1


async def fail(verifier, sequence):
    sequence.emit([300, 301])
    sequence.emit([], FinishReason.ERROR)


@pytest.mark.parametrize(
    ("path", "fields", "failed", "lost"),
    [
        ("/v1/chat/completions", {"n": 2}, "server_error", "verifier_lost"),
        ("/v1/completions", {"n": 2}, "server_error", "verifier_lost"),
        ("/v1/messages", {}, "api_error", "overloaded_error"),
        ("/v1/responses", {}, "server_error", "server_error"),
    ],
)
async def test_an_engine_that_fails_mid_stream_or_is_lost_is_one_error_event(path, fields, failed, lost, caplog):
    async with running_gateway(queue_wait_s=0) as running:
        body = {**BODIES[path], **fields, "stream": True}
        running.verifier.behaviour = fail
        *_, last = heard((await running.http.post(path, json=body)).text)
        error = last.get("response", last)["error"]
        assert error["code" if path == "/v1/responses" else "type"] == failed
        assert error["message"] == "The server had an error while processing your request."
        running.verifier.behaviour = stall
        async with running.http.stream("POST", path, json=body) as answer:
            await running.until_emitted(fields.get("n", 1))
            running.verifier.kill()
            await answer.aread()
        chunks = heard(answer.text)
        errors = [each for each in chunks if "error" in each or each.get("type") == "response.failed"]
        assert errors == [chunks[-1]]
        response = errors[0].get("response", errors[0])
        assert response["error"]["type" if path == "/v1/messages" else "code"] == lost
        if path == "/v1/responses":
            assert (await running.http.get(f"{path}/{response['id']}")).json()["status"] == "failed"
        assert running.idle
    # Other names: a client of an earlier test may be collected just now, and asyncio reports its tasks.
    assert not [
        each for each in caplog.records if each.exc_info and each.name.startswith(("outrider", "gateway", "backend", "uvicorn"))
    ]
