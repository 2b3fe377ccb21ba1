"""Traces: contexts, sampling, what each process puts into its spans, and nothing at all when off."""

import logging
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backend import tracing
from backend.config import Settings, sources
from backend.config.settings import TracingSettings
from backend.drafter.spans import DraftSpans
from backend.engine.observers import UNDRAFTED, RequestState, Verification
from backend.engine.spans import TRACE_ARGUMENT, EngineSpans
from backend.speculation.chances import Rule
from backend.tracing import Tracing, open_tracing
from backend.wire.engine import Account, RequestOptions, Tally
from gateway.cli.main import main

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
NOT_KEPT = PARENT[:-1] + "0"


class Kept:
    """A `Tracing` whose spans stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing("test", "test-0", self._exporter)

    def spans(self) -> list[Any]:
        """All; there can be no more."""
        self.tracing.close()
        return list(self._exporter.get_finished_spans())


def test_off_is_none_and_imports_nothing() -> None:
    assert open_tracing(Settings().tracing, "gateway", "x") is None
    code = "import sys, backend.tracing, backend.config as c; backend.tracing.check(c.Settings().tracing);"
    code += "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_extra_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(sources.ConfigError, match=r"docs/operate/tracing\.md"):
        tracing.check(TracingSettings(endpoint="http://127.0.0.1:4318"))
    assert main(["serve", "--port", "0", "--tracing-endpoint", "http://127.0.0.1:4318"]) == 2
    assert capsys.readouterr().err.strip() == f"outrider: {tracing.MISSING}"


def test_a_collectors_address_stands_for_its_path_and_what_is_no_http_collector_is_refused() -> None:
    for given in ("http://collector:4318", "http://collector:4318/", "http://collector:4318/v1/traces"):
        assert sources.load(["--tracing-endpoint", given]).settings.tracing.endpoint == "http://collector:4318/v1/traces"
    assert sources.load(["--tracing-endpoint", "https://host/own/path"]).settings.tracing.endpoint == "https://host/own/path"
    for wrong in ("collector:4317", "grpc://collector:4317", "http://"):
        with pytest.raises(sources.ConfigError, match=r"--tracing-endpoint: .*OTLP/HTTP"):
            sources.load(["--tracing-endpoint", wrong])


def test_who_began_the_trace_decides_whether_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    always = Kept()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    never = Kept()
    assert never.tracing.start("a", None) is None
    assert never.tracing.start("a", {"traceparent": PARENT}) is not None
    assert always.tracing.start("a", {"traceparent": NOT_KEPT}) is None
    assert always.tracing.start("a", {"traceparent": "nonsense"}) is not None
    assert always.spans() == never.spans() == [], "none has ended"


def test_a_collector_that_is_away_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    logging.getLogger("opentelemetry").handlers.clear()
    opened = open_tracing(TracingSettings(endpoint=endpoint), "gateway", "x")
    assert opened is not None
    for _ in range(2):
        span = opened.start("a", None)
        assert span is not None
        span.end()
        opened._provider.force_flush(100)
    opened.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("spans are lost (further losses are not logged): ")
    assert "\n" not in line


def ended(headers: dict[str, str] | None, steps: int, reason: str = "stop") -> tuple[Any, dict[str, Any]]:
    """A request that has ended after so many steps, and its spans."""
    kept = Kept()
    traces = EngineSpans(kept.tracing, "verifier-0")
    request = SimpleNamespace(
        request_id="r",
        trace_headers=headers,
        num_prompt_tokens=7,
        num_output_tokens=2,
        sampling_params=SimpleNamespace(extra_args={"own": 1}),
        outrider=RequestState(RequestOptions(), Rule.GREEDY),
    )
    traces.began(request)
    for _ in range(steps):
        traces.scheduled(request)
        traces.verified(Verification(request, 9, 0, 0, UNDRAFTED), 1, 0.0)
    if request.outrider.account is not None:
        tallies = [Tally("fresh", "drafter-1", 1, 4, 1), Tally("fresh", "drafter-0", 1, 4, 3)]
        request.outrider.account = Account("r", 8, 3, [0, 1, 0, 1], tallies)
    traces.ended(request, reason)
    return request, {span.name: span for span in kept.spans()}


def test_a_verifiers_spans_tell_where_the_time_went() -> None:
    request, spans = ended({"traceparent": PARENT}, 2)
    assert set(spans) == {"verifier", "queue", "prefill", "decode"}
    verifier = spans["verifier"]
    assert f"{verifier.context.trace_id:032x}" == TRACE_ID
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {each.parent.span_id for each in parts} == {verifier.context.span_id}
    times = [verifier.start_time, *(each.end_time for each in parts)]
    assert [each.start_time for each in parts] == times[:-1]
    assert times[-1] == verifier.end_time
    decode = spans["decode"].attributes
    assert (decode["outrider.drafts"], decode["outrider.verifications"]) == (2, 3)
    assert (decode["outrider.draft_tokens"], decode["outrider.accepted_tokens"]) == (8, 4)
    assert decode["outrider.acceptance_length"] == 3.0
    assert decode["outrider.drafters"] == "drafter-0,drafter-1"
    assert verifier.attributes["gen_ai.usage.completion_tokens"] == 8
    # The drafter's span is to hang below the verifier's.
    assert request.sampling_params.extra_args["own"] == 1
    assert request.sampling_params.extra_args[TRACE_ARGUMENT].split("-")[2] == f"{verifier.context.span_id:016x}"


def test_an_untraced_request_leaves_nothing_behind_and_one_that_never_ran_has_only_waited() -> None:
    for headers in (None, {}, {"traceparent": NOT_KEPT}):
        request, spans = ended(headers, 1)
        assert (spans, request.outrider.account, request.sampling_params.extra_args) == ({}, None, {"own": 1})
    assert ended({"traceparent": PARENT}, 0, "abort")[1].keys() == {"verifier", "queue"}


def test_a_drafters_span_sums_its_rounds() -> None:
    kept = Kept()
    traces = DraftSpans(kept.tracing, "drafter-0")
    key = ("verifier-0", 1, "r")
    traces.opened(key, PARENT)
    traces.drafted(key, 4, 0.002)
    traces.drafted(key, 3, 0.003)
    traces.imagined(key, 5, 0.004)
    traces.drafted(("verifier-0", 1, "stranger"), 4, 1.0)
    traces.closed(key, "finished")
    (span,) = kept.spans()
    assert span.name == "drafter"
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    found = dict(span.attributes)
    assert (found["outrider.batches"], found["outrider.draft_tokens"], found["outrider.outcomes"]) == (2, 7, 5)
    assert found["outrider.drafting_ms"] == pytest.approx(5.0)
