"""Rollouts: of fixed responses with a fleet of their own; and a verifier killed in the middle, which costs no token."""

import csv
import json
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.fleet_process import ServedFleet, outrider, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

PROMPTS, SAMPLES, TOKENS = 16, 2, 800


def test_a_killed_verifier_costs_time_and_no_token(tmp_path: Path) -> None:
    trace = tmp_path / "train.1.parquet"
    made = outrider("trace", "make", "stdlib", "--out", str(trace), "--limit", str(PROMPTS))
    assert made.wait(120) == 0, made.stdout and made.stdout.read()
    with ServedFleet("--verifiers", "2", "--drafters", "1") as fleet:
        texts = []
        for name, kill in (("disturbed", True), ("left alone", False)):
            wait_for(lambda: [each["state"] for each in fleet.fleet()["verifiers"]] == ["ready", "ready"], 120, "two verifiers")
            out = tmp_path / name
            flags = ["--trace", str(trace), "--out", str(out), "--n", str(SAMPLES), "--max-tokens", str(TOKENS), "--seed", "3"]
            work = outrider("rollout", "--join", str(fleet.process.pid), *flags, "--sampling", '{"ignore_eos": true}')
            if kill:
                doomed = fleet.fleet()["verifiers"][1]
                wait_for(lambda doomed=doomed: fleet.metric("outrider_verifier_running", verifier=doomed["id"]) > 2, 60, "work")  # type: ignore[misc]
                os.kill(doomed["pid"], signal.SIGKILL)
            output, _ = work.communicate(timeout=300)
            assert work.returncode == 0, output
            directory = out / "step1" / "round0"
            report = json.loads((directory / "report.json").read_text())
            assert [each["worker"] for each in report["died"]] == ([1] if kill else [])
            assert (report["died"][0]["requests_resumed"] > 0) if kill else True
            rows = [row for file in directory.glob("*_request.csv") for row in csv.DictReader(file.open(encoding="utf-8"))]
            assert sorted(int(row["req_id"]) for row in rows) == list(range(PROMPTS * SAMPLES))
            assert {int(row["response_length"]) for row in rows} == {TOKENS}
            texts.append(pq.read_table(out / "cases" / "train.1.parquet").to_pylist())
        assert texts[0] == texts[1]


def test_a_fleet_of_its_own_replays_fixed_responses(tmp_path: Path) -> None:
    trace = tmp_path / "train.5.parquet"
    limits = ("--limit", "9", "--max-gen", "70", "--max-prompt", "40")
    for command in (
        ("trace", "make", "stdlib", "--out", str(trace), *limits),
        ("rollout", "--trace", str(trace), "--out", str(tmp_path), "--fixed-responses", "--verifiers", "1", "--mode", "sync"),
    ):
        work = outrider(*command)
        output, _ = work.communicate(timeout=300)
        assert work.returncode == 0, output
    cases = pq.read_table(tmp_path / "cases" / "train.5.parquet").to_pylist()
    assert cases == [{"id": number, **row} for number, row in enumerate(pq.read_table(trace).to_pylist())]
    report = json.loads((tmp_path / "step5" / "round0" / "report.json").read_text())
    assert report["acceptance_is"] == "teacher_forced"
    assert report["teacher_forced_acceptance_length"] > 1
    assert "live_acceptance_length" not in report
