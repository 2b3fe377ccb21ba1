"""One line per request, with its id, key, tokens and verifier, and nothing that it said; times in headers; spans."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from backend.config.logs import formatter
from tests.support.collector import Collector
from tests.support.fake_verifier import eventually, gated
from tests.support.running_gateway import CHAT, COMPLETION, Running, running_gateway


def lines(caplog):
    return [each.fields for each in caplog.records if each.name == "outrider.access"]


async def test_a_line_per_request_that_says_who_and_how_much_but_not_what(caplog):
    caplog.set_level(logging.INFO)
    async with running_gateway(api_key="s3cret") as running:
        key = {"authorization": "Bearer s3cret"}
        mine = {**key, "x-request-id": "my-id"}
        body = {**CHAT, "messages": [{"role": "user", "content": "unspeakable"}], "n": 2}
        answer = await running.http.post("/v1/chat/completions", json=body, headers=mine)
        assert answer.status_code == 200
        await running.http.post("/v1/completions", json=COMPLETION)
        await running.http.get("/nowhere/unspeakable", headers=key)
        await running.http.get("/livez")
        assert all("my-id" in each.request_id for each in running.verifier.sequences), "to the verifier's records"
        first, refused, unknown = lines(caplog)
        assert first["ms"] > 0
        usage = answer.json()["usage"]
        assert {**first, "ms": 0, "queued_ms": 0} == {
            "method": "POST",
            "route": "/v1/chat/completions",
            "status": 200,
            "ms": 0,
            "key": "api-key",
            "request_id": "my-id",
            "prompt_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "queued_ms": 0,
            "verifier": "verifier-0",
        }
        assert (refused["status"], refused["key"], "verifier" in refused) == (401, None, False)
        assert (unknown["status"], unknown["route"]) == (404, "unmatched")
    assert "unspeakable" not in caplog.text
    assert "s3cret" not in caplog.text


async def test_headers_say_how_long_it_took_and_how_much_of_that_was_ours(running):
    gate = asyncio.Event()
    running.verifier.behaviour = gated(gate)
    request = running.begin()
    await eventually(lambda: len(running.verifier.sequences) == 1)
    await asyncio.sleep(0.2)
    gate.set()
    headers = (await request).headers
    assert float(headers["openai-processing-ms"]) >= 200
    assert 0 < float(headers["x-outrider-gateway-ms"]) < float(headers["openai-processing-ms"]) - 150


@contextmanager
def logged(kind, name):
    """What a logger writes in one of the formats."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(kind))
    log = logging.getLogger(name)
    log.addHandler(handler)
    try:
        yield stream
    finally:
        log.removeHandler(handler)


def test_json_lines():
    with logged("json", "test.json") as stream:
        log = logging.getLogger("test.json")
        log.warning("two\n%s", "lines", extra={"fields": {"status": 200}})
        try:
            raise ValueError("x")
        except ValueError:
            log.exception("broken")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["status"], first["logger"]) == ("two\nlines", "warning", 200, "test.json")
    assert first["time"].endswith("+00:00")
    assert "ValueError: x" in second["exception"]


async def test_a_url_forges_no_text_line(caplog):
    caplog.set_level(logging.INFO)
    forged = "/admin/x%E2%80%A82026-01-01 INFO outrider.audit: by=root"
    with logged("text", "outrider.audit") as stream:
        async with running_gateway(admin_key="adm") as running:
            assert (await running.http.post(forged)).status_code == 401
    (line,) = stream.getvalue().splitlines()
    assert "what=POST /admin/x%E2%80%A82026-01-01%20INFO%20outrider.audit%3A%20by%3Droot fields" in line


TENSORS = b"\x08\0\0\0\0\0\0\0{}      " * 1000


@pytest.mark.parametrize(
    ("path", "kind", "body", "fields"),
    [
        ("/admin/drain", "json", b"[" * 1500, json.dumps("[" * 1500)),
        ("/admin/drain", "json", b" \n" * 2000 + b'{"member": "v"}', '{"member":"v"}'),
        ("/admin/drain", "json", b'{"member": "' + b"v" * 3000 + b'"}', json.dumps('{"member": "' + "v" * 2036)),
        ("/update_weights", "octet-stream", TENSORS, '"16000 bytes"'),
    ],
)
async def test_what_was_asked_is_logged_whatever_its_form_and_of_weights_the_size(
    running, caplog, monkeypatch, path, kind, body, fields
):
    caplog.set_level(logging.INFO)
    # Tensors may be larger than other bodies.
    monkeypatch.setattr("gateway.auth.access.MAX_BODY_BYTES", 8000)
    answer = await running.http.post(path, content=body, headers={"content-type": f"application/{kind}"})
    (line,) = [each.fields for each in caplog.records if each.name == "outrider.audit"]
    assert (line["status"], line["fields"]) == (answer.status_code, fields)
    assert answer.status_code not in (413, 500)


def test_warnings_and_what_vllm_says_are_lines_of_the_log_or_none():
    code = "import logging, warnings; import backend.engine; logging.getLogger('vllm.x').warning('bare'); "
    code += "from backend.config.logs import configure_logging; configure_logging('info'); warnings.warn('two\\nlines')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = ran.stderr.splitlines()
    assert " WARNING py.warnings: " in line
    assert "two" in line


def test_an_error_forges_no_text_line():
    with logged("text", "test.text") as stream:
        try:
            raise ValueError("x\n2026-01-01 INFO outrider.audit: by=root\rb")
        except ValueError:
            logging.getLogger("test.text").exception("broken by naïve\tclients")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(r"broken by naïve\tclients")
    assert len(rest) >= 4
    assert all(line.startswith("  ") for line in rest)
    assert rest[-1].endswith(r"by=root\rb")


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


async def test_a_gateway_that_cannot_say_that_it_serves_logs_why(running: Running, caplog: pytest.LogCaptureFixture):
    running.server._on_ready = Mock(side_effect=OSError("the disk is full"))
    await running.server._announce()
    assert "the gateway serves, but cannot say so: the disk is full" in caplog.text
