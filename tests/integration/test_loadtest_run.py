"""A whole run of the load test, Locust included, against a stub gateway."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.support.sse_server import StubGateway, stream_of


def run(stub: StubGateway, results: Path, *arguments: str) -> int:
    try:
        return main(["--host", stub.url, "--results", str(results), "--duration", "1", "--slo", "tgs_p50=0", *arguments])
    finally:
        stub.close()


def test_a_run_leaves_its_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Chunks that come in one piece have no rate between them.
    limits = ["--no-default-slo", "--slo", "failures=0,requests=5,ttft_p95_ms=5000"]
    assert run(StubGateway(stream_of("a", "b")), tmp_path, "--scenario", "mixed", "--users", "2", *limits) == 0, (
        capsys.readouterr()
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] is True
    assert summary["figures"]["failures"] == 0
    assert "lag_p99_ms" in summary["load_generator"]
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert len(rows) == summary["figures"]["requests"] >= 5
    assert {row["user"] for row in rows} == {"0", "1"}
    assert all(float(row["ttft_ms"]) > 0 and row["tokens"] == "2" for row in rows)
    # Rows of first-token times stand beside the requests and do not count as some.
    stats = list(csv.DictReader((tmp_path / "locust_stats.csv").open()))
    assert {"POST", "TTFT"} <= {row["Type"] for row in stats}
    (total,) = [row for row in stats if row["Name"] == "Aggregated"]
    assert int(total["Request Count"]) == len(rows)
    assert "TTFT" in (tmp_path / "report.html").read_text()
    assert len(list(csv.DictReader((tmp_path / "fleet.csv").open()))) >= 2


def test_arrivals_do_not_wait_and_failures_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = StubGateway(stream_of("a", "b", done=False))
    assert run(stub, tmp_path, "--scenario", "poisson", "--rate", "30") == 1
    assert "failure: no [DONE]" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["figures"]["failures"] >= 10
    assert any("failures" in miss for miss in summary["missed"])
