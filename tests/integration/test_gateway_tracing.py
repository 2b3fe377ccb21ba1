"""The gateway's spans over HTTP and OTLP: the client's trace goes on, through the sequence, to the verifier's request."""

import pytest

from tests.support.collector import Collector
from tests.support.fake_verifier import eventually
from tests.support.running_gateway import CHAT, COMPLETION, running_gateway

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "tracestate": "vendor=1"}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


async def test_one_request_is_one_trace(collector):
    async with running_gateway(tracing={"endpoint": collector.url}) as running:
        body = {**CHAT, "stream": True}
        answer = await running.http.post("/v1/chat/completions", json=body, headers={**PARENT, "x-request-id": "mine"})
        assert answer.text.endswith("data: [DONE]\n\n")
        headers = running.verifier.sequences[0].request.trace_headers
        await running.http.get("/readyz")
        await eventually(lambda: len(collector.spans) >= 2)
        (http,) = collector.named("POST /v1/chat/completions")
        (sequence,) = collector.named("sequence")
    assert len(collector.spans) == 2
    assert {http.trace_id, sequence.trace_id} == {TRACE_ID}
    assert (http.parent_id, sequence.parent_id) == (CALLER, http.span_id)
    assert headers == {"traceparent": f"00-{TRACE_ID}-{http.span_id}-01", "tracestate": "vendor=1"}
    assert http.service == "outrider-gateway"
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["outrider.request_id"] == "mine"
    assert sequence.attributes["outrider.verifier"] == "verifier-0"
    assert sequence.attributes["gen_ai.usage.completion_tokens"] == CHAT["max_tokens"]
    assert sequence.attributes["outrider.finish_reason"] == "length"
    assert sequence.events == ["first token"]
    assert http.start_ns <= sequence.start_ns <= sequence.end_ns <= http.end_ns


async def test_off_takes_no_notice_of_contexts(running):
    assert (await running.http.post("/v1/completions", json=COMPLETION, headers=PARENT)).status_code == 200
    assert running.verifier.sequences[0].request.trace_headers is None
