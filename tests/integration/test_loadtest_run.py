"""Whole runs of the load test, Locust included, against a stub gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sse_server import StubGateway, stream_of

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, module: Sequence[str] = ("loadtest",)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def loaded(stub: StubGateway, results: Path, *arguments: str, status: int, **more: Any) -> Any:
    """Loads the stub; returns the summary."""
    try:
        done = run("--host", stub.url, "--results", str(results), *arguments, **more)
    finally:
        stub.close()
    assert done.returncode == status, done.stdout + done.stderr
    assert (results / "summary.md").read_text() in done.stdout
    return json.loads((results / "summary.json").read_text())


def test_a_run_leaves_its_reports(tmp_path: Path) -> None:
    stub = StubGateway(stream_of("a", "b", "c"), 0.02)
    summary = loaded(stub, tmp_path, "--scenario", "mixed", "--users", "2", "--duration", "2", status=0)
    assert summary["passed"] is True
    assert (summary["users"], summary["slo"]["tgs_p50"], "leftover" in summary["slo"]) == (2, 5, False)
    figures = summary["figures"]
    assert (figures["failures"], figures["rejected"]) == (0, 0)
    assert figures["requests"] >= 5
    # A chunk every 20 ms, or later on a busy machine.
    assert 18 <= figures["tpot_p50_ms"] <= 200
    assert figures["tgs_p50"] == pytest.approx(1000 / figures["tpot_p50_ms"], rel=0.05)
    assert figures["e2e_p50_ms"] >= figures["ttft_p50_ms"] + 2 * 18
    assert figures["tokens_per_s"] == pytest.approx(3 * figures["requests_per_s"], rel=0.01)
    report = (tmp_path / "report.html").read_text()
    assert all(kind in report for kind in ("TTFT", "TPOT", "TGS tok/s"))


def test_failures_gate_and_the_locustfile_is_one_of_locusts(tmp_path: Path) -> None:
    stub = StubGateway(stream_of("a", "b", done=False), 0.01)
    locust = ("locust", "-f", "loadtest/locustfile.py", "--headless")
    summary = loaded(stub, tmp_path, "--duration", "1", status=1, module=locust)
    assert (summary["scenario"], summary["figures"]["requests"]) == ("chat", 0)
    assert summary["figures"]["failures"] >= 10
    assert f"failures: {summary['figures']['failures']} is above the limit of 0" in summary["missed"]
    assert "ttft_p95_ms: nothing was measured (limit 5000)" in summary["missed"]
    assert "no [DONE]" in (tmp_path / "report.html").read_text()


def test_what_is_unanswered_at_the_end_is_a_failure(tmp_path: Path) -> None:
    stub = StubGateway(stream_of("a", "b"), 30)
    limits = ("--no-default-slo", "--slo", "failures=0,acceptance_length=2")
    summary = loaded(stub, tmp_path, "--users", "3", "--duration", "1", "--stop-timeout", "1", *limits, status=1)
    assert summary["missed"] == [
        "failures: 3 is above the limit of 0",
        "acceptance_length: nothing was measured (limit 2)",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--host", "http://h", "--", "--mode", "off"], 2, "behind --"),
        (["--host", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 does not answer"),
        (["--", "--mode", "none"], 1, "the fleet did not start"),
    ],
)
def test_what_cannot_be_run_says_why(arguments: list[str], status: int, message: str, tmp_path: Path) -> None:
    done = run("--results", str(tmp_path), *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    assert message in done.stderr
