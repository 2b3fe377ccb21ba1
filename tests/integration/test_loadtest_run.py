"""A whole run of the load test, Locust included, against a stub gateway."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import loadtest.run
from loadtest.__main__ import main
from loadtest.served import FleetError, Gateway
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
    report = (tmp_path / "report.html").read_text()
    assert all(row["label"] in report for row in rows)
    assert len(list(csv.DictReader((tmp_path / "fleet.csv").open()))) >= 2


def test_failures_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = StubGateway(stream_of("a", "b", done=False))
    assert run(stub, tmp_path, "--scenario", "completion") == 1
    assert "failure: no [DONE]" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["figures"]["failures"] >= 10
    assert any("failures" in miss for miss in summary["missed"])


class StubFleet:
    """In place of a fleet of our own: a stub gateway, slower where the settings say that nothing is drafted."""

    def __init__(self, settings: tuple[str, ...], log: Path) -> None:
        self.settings = settings
        self.stub = StubGateway(stream_of("a", "b", "c", "d", "e"), 0.02 if "off" in settings else 0.004)
        started.append(self)

    def wait_ready(self) -> str:
        return self.stub.url

    def kill_a_drafter(self, gateway: Gateway) -> str:
        if not gateway.drafters():
            raise FleetError("no drafter")
        self.stub.drafters = {4002: "drafter-0"}
        return "drafter-0"

    def stop(self) -> None:
        self.stub.close()


started: list[StubFleet] = []


@pytest.fixture
def own_fleets(monkeypatch: pytest.MonkeyPatch) -> list[StubFleet]:
    started.clear()
    monkeypatch.setattr(loadtest.run, "OwnFleet", StubFleet)
    return started


def test_two_fleets_are_compared_pair_by_pair(own_fleets: list[StubFleet], tmp_path: Path) -> None:
    arguments = [
        "--scenario",
        "compare",
        "--duration",
        "1",
        "--users",
        "2",
        "--results",
        str(tmp_path),
        "--slo",
        "speedup_p50=1.5",
    ]
    assert main([*arguments, "--", "--mode", "sync"]) == 0
    assert [fleet.settings for fleet in own_fleets] == [("--mode", "sync", "--mode", "off"), ("--mode", "sync")]
    figures = json.loads((tmp_path / "summary.json").read_text())["figures"]
    assert figures["pairs"] >= 5
    assert figures["identical"] == 1
    assert json.loads((tmp_path / "off" / "summary.json").read_text())["figures"]["tgs_p50"] < figures["tgs_p50"]


def test_a_drafter_is_killed_under_load(own_fleets: list[StubFleet], tmp_path: Path) -> None:
    assert main(["--scenario", "fault", "--duration", "2", "--results", str(tmp_path)]) == 0
    notes = json.loads((tmp_path / "summary.json").read_text())["notes"]
    assert notes[0] == "killed drafter-0"
    assert "another drafter was ready" in notes[1]


def test_a_fault_that_cannot_be_made_fails_the_run(
    own_fleets: list[StubFleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Gateway, "drafters", lambda self: {})
    assert main(["--scenario", "fault", "--duration", "1", "--results", str(tmp_path)]) == 1
    assert "loadtest: no drafter" in capsys.readouterr().err
