"""Whole runs of the load test, Locust included, against a stub gateway; and vLLM's own benchmark client against ours."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_chat_completions,
    async_request_openai_completions,
)
from vllm.benchmarks.serve import fetch_spec_decode_metrics, get_first_model_from_server

from backend.fleet import DraftCounters, VerifierStats
from loadtest.vllm_bench import main
from tests.support.fake_verifier import eventually
from tests.support.running_gateway import running_gateway

ROOT = Path(__file__).resolve().parents[2]


def stream_of(*texts: str) -> list[bytes]:
    """The events of a streamed completion, one piece each."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": text, "finish_reason": "length" if text == texts[-1] else None}]} for text in texts
    ]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}})
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


class StubGateway:
    """Has the routes that load tests use; answers every POST with `pieces`, one every `pause_s`.

    Its metrics count two drafts, from two verifiers, and three accepted tokens for each answer.
    """

    def __init__(self, pieces: Sequence[bytes], pause_s: float = 0.0, status: int = 200) -> None:
        answered = itertools.count(1)
        drafts, accepted = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
        documents = {"/v1/models": '{"data": [{"id": "stub"}]}', "/metrics": f"{accepted} 0\n"}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer([documents[self.path].encode()], "text/plain")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._answer(pieces, "text/event-stream", pause_s, status)
                n = next(answered)
                documents["/metrics"] = f'{drafts}{{v="a"}} {n}\n{drafts}{{v="b"}} {n}\n{accepted} {3 * n}\n'

            def _answer(self, parts: Sequence[bytes], kind: str, pause_s: float = 0.0, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("retry-after", "1")
                self.send_header("content-length", str(sum(map(len, parts))))
                self.end_headers()
                for part in parts:
                    self.wfile.write(part)
                    if pause_s:
                        time.sleep(pause_s)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def loaded(stub: StubGateway, results: Path, *arguments: str, status: int) -> Any:
    """Loads the stub; returns the summary."""
    try:
        done = run("--host", stub.url, "--results", str(results), *arguments)
    finally:
        stub.close()
    assert done.returncode == status, done.stdout + done.stderr
    summary = (results / "summary.json").read_text()
    assert summary in done.stdout
    return json.loads(summary)


def test_a_run_leaves_its_reports(tmp_path: Path) -> None:
    stub = StubGateway(stream_of("a", "b", "c"), 0.02)
    more = ("--scenario", "mixed", "--users", "2", "--duration", "2", "--slo", "acceptance_length=2.5")
    summary = loaded(stub, tmp_path, *more, status=0)
    assert summary["passed"] is True
    assert (summary["users"], summary["slo"]["tgs_p50"], "leftover" in summary["slo"]) == (2, 5, False)
    figures = summary["figures"]
    assert (figures["failures"], figures["rejected"], figures["acceptance_length"]) == (0, 0, 2.5)
    assert figures["requests"] > 0
    # A chunk every 20 ms, or later on a busy machine.
    assert figures["tpot_p50_ms"] >= 18
    assert figures["tgs_p50"] == pytest.approx(1000 / figures["tpot_p50_ms"], rel=0.05)
    assert figures["e2e_p50_ms"] >= figures["ttft_p50_ms"] + 2 * 18
    assert figures["tokens_per_s"] == pytest.approx(3 * figures["requests_per_s"], rel=0.01)
    report = (tmp_path / "report.html").read_text()
    assert all(kind in report for kind in ("TTFT", "TPOT", "TGS tok/s"))


def test_what_an_overloaded_server_refuses_is_rejected_and_no_failure(tmp_path: Path) -> None:
    stub = StubGateway([b'{"error": {"message": "secret", "code": "full"}}'], 0.01, status=429)
    summary = loaded(stub, tmp_path, "--duration", "1", "--no-default-slo", "--slo", "failures=0", status=0)
    assert summary["figures"]["rejected"] > 0
    report = (tmp_path / "report.html").read_text()
    assert "rejected: 429 full" in report
    assert "secret" not in report


def test_what_is_unanswered_at_the_end_is_a_failure_and_failures_gate(tmp_path: Path) -> None:
    stub = StubGateway(stream_of("a", "b"), 30)
    more = ("--users", "3", "--duration", "1", "--stop-timeout", "1", "--slo", "acceptance_length=2")
    summary = loaded(stub, tmp_path, *more, status=1)
    assert (summary["scenario"], summary["figures"]["requests"]) == ("chat", 0)
    assert 1 <= summary["figures"]["failures"] <= 3
    assert {
        f"failures: {summary['figures']['failures']} is above the limit of 0",
        "ttft_p95_ms: nothing was measured (limit 5000)",
        "acceptance_length: nothing was measured (limit 2)",
    } <= {*summary["missed"]}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--host", "http://h", "--serve=--mode off"], 2, "--serve is for"),
        (["--slo", "ttft_p95=1"], 2, "did you mean ttft_p95_ms"),
        (["--host", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 does not answer"),
        (["--serve=--mode none"], 1, "the fleet did not start"),
    ],
)
def test_what_cannot_be_run_says_why(arguments: list[str], status: int, message: str, tmp_path: Path) -> None:
    done = run("--results", str(tmp_path), *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    assert message in done.stderr


async def test_vllms_own_benchmark_client_finds_model_streams_and_acceptance(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    headers = {"authorization": "Bearer k3y"}
    async with running_gateway(api_key="k3y", served_model_name="org/model") as running, aiohttp.ClientSession() as session:
        url = running.server.url
        assert await get_first_model_from_server(url, headers) == ("org/model", "org/model")
        for path, ask in (
            ("completions", async_request_openai_completions),
            ("chat/completions", async_request_openai_chat_completions),
        ):
            request = RequestFuncInput("def f(", f"{url}/v1/{path}", 4, 6, "org/model", ignore_eos=True)
            answer = await ask(request, session)
            assert answer.success, answer.error
            assert answer.output_tokens == 6
            assert answer.ttft > 0
        counted = DraftCounters(10, 40, 15, drafted_by_position=[10] * 4, accepted_by_position=[10, 5, 0, 0])
        running.verifier.publish(VerifierStats("verifier-0", 1.0, "sync", 4, drafters={"drafter-0": counted}))
        await eventually(lambda: bool(running.core.stats()))
        # It has no key for /metrics.
        before = await fetch_spec_decode_metrics(url, session)
        assert (before.num_drafts, before.num_draft_tokens, before.num_accepted_tokens) == (10, 40, 15)
        assert before.accepted_per_pos == {0: 10, 1: 5, 2: 0, 3: 0}


def test_it_has_the_options_that_the_documentation_uses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help=all"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    options = ("base-url", "tokenizer", "random-input-len", "random-output-len", "num-prompts", "max-concurrency")
    assert [each for each in options if f"--{each}" not in shown] == []
