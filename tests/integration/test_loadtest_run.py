"""Whole runs of the load test, Locust included, and vLLM's own benchmark client, against a gateway with fake verifiers."""

import asyncio
import json
import subprocess
import sys
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
from vllm.v1.engine import FinishReason

from backend.fleet import DraftCounters, VerifierStats
from loadtest.vllm_bench import main
from tests.support.fake_verifier import FakeVerifier, Sequence, eventually, silence, stall
from tests.support.running_gateway import COMPLETION, Running, running_gateway

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


async def loaded(running: Running, results: Path, *arguments: str, status: int) -> Any:
    """Loads the gateway; returns the summary."""
    done = await asyncio.to_thread(run, "--host", running.server.url, "--results", str(results), *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    summary = (results / "summary.json").read_text()
    assert summary in done.stdout
    return json.loads(summary)


async def drafted(verifier: FakeVerifier, sequence: Sequence) -> None:
    """Three tokens, one every 20 ms.  Every answer is counted with two drafts and three accepted tokens."""
    answers = len(verifier.sequences)
    counted = DraftCounters(drafts=2 * answers, accepted_tokens=3 * answers)
    verifier.publish(VerifierStats(verifier.name, 1.0, "sync", 4, drafters={"drafter-0": counted}))
    for token in (300, 301, 302):
        await asyncio.sleep(0.02)
        sequence.emit([token], FinishReason.LENGTH if token == 302 else None)


async def test_a_run_leaves_its_reports(tmp_path: Path) -> None:
    async with running_gateway(verifiers=2) as running:
        for verifier in running.verifiers:
            verifier.behaviour = drafted
        more = ("--scenario", "mixed", "--prompt-tokens", "8", "--users", "2", "--run-time", "2")
        summary = await loaded(running, tmp_path, *more, "--slo", "acceptance_length=2.5", status=0)
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


async def test_what_an_overloaded_server_refuses_is_rejected_and_no_failure(tmp_path: Path) -> None:
    async with running_gateway(max_in_flight=1) as running:
        running.verifier.behaviour = silence
        running.begin()
        await eventually(lambda: bool(running.verifier.sequences))
        refused = await running.http.post("/v1/completions", json=COMPLETION)
        summary = await loaded(running, tmp_path, "--run-time", "1", "--no-default-slo", "--slo", "failures=0", status=0)
    assert summary["figures"]["rejected"] > 0
    report = (tmp_path / "report.html").read_text()
    assert "rejected: 429 rate_limit_exceeded" in report
    assert refused.json()["error"]["message"] not in report


async def test_what_is_unanswered_at_the_end_is_a_failure_and_failures_gate(tmp_path: Path) -> None:
    async with running_gateway() as running:
        running.verifier.behaviour = stall
        more = ("--users", "3", "--run-time", "1", "--stop-timeout", "1", "--slo", "acceptance_length=2")
        summary = await loaded(running, tmp_path, *more, status=1)
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
