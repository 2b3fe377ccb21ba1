"""`outrider rollout` end to end on a verifier of its own: files are where scripts look, numbers add up.

`test_trainer_calls.py` has one that joins a fleet, `tests/campaign` one of several verifiers.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from backend.models.demo import TARGET_DIR
from backend.rollout.requests import Tokenizer
from tests.support.processes import ENGINE_ENV, ROOT

pytestmark = pytest.mark.engine

ROUNDS = 2


def outrider(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ENGINE_ENV | {"XDG_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


COLUMNS = {
    "perf": [
        "step_tgs", "step_tokens", "cur_acc_len", "step_batchsize", "step_ts", "step_interval", "draft_nstep",
        "draft_time", "verify_time", "idle_time",
    ],
    "request": [
        "req_id", "rollout_time", "rollout_step", "prompt_length", "response_length", "spec_accept_rate",
        "spec_matched_total", "spec_draft_total", "spec_accepted_total",
    ],
    "markov": ["acc_token_num", "draft_token_num", "verify_token_num", "cur_step", "req_id"],
}  # fmt: skip


def table(directory: Path, worker: int, name: str) -> list[dict[str, str]]:
    with (directory / f"worker_{worker}_{name}.csv").open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        assert reader.fieldnames == COLUMNS[name]
        return list(reader)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("r")
    trace = directory / "train.5.parquet"
    made = outrider(
        directory, "trace", "make", "stdlib", "--out", str(trace), "--limit", "9", "--max-gen", "70", "--max-prompt", "40"
    )
    assert made.returncode == 0, made.stderr
    fleet = ["--verifiers", "1", "--drafters", "1", "--mode", "sync", "--num-speculative-tokens", "3"]
    (directory / "w").mkdir()
    (directory / "w" / "step-8").symlink_to(TARGET_DIR)
    run = ["--trace", str(trace), "--out", str(directory), "--repeat", str(ROUNDS), "--fixed-responses"]
    run += ["--weights-dir", str(directory / "w")]
    done = outrider(directory, "rollout", *run, *fleet)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_generated_cases_are_the_trace(out: Path) -> None:
    trace, cases = pq.read_table(out / "train.5.parquet").to_pylist(), pq.read_table(out / "cases" / "train.5.parquet")
    assert cases.column_names == ["id", "prompt", "gen"]
    assert cases.to_pylist() == [{"id": number, **row} for number, row in enumerate(trace)]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_tables_add_up(out: Path, number: int) -> None:
    directory = out / "step5" / f"round{number}"
    tokenizer = Tokenizer(str(TARGET_DIR))
    trace = pq.read_table(out / "train.5.parquet").to_pylist()
    perf, requests, markov = (table(directory, 0, name) for name in COLUMNS)
    assert sorted(int(row["req_id"]) for row in requests) == list(range(len(trace)))
    by_request: dict[int, list[dict[str, str]]] = defaultdict(list)
    for row in markov:
        by_request[int(row["req_id"])].append(row)
        assert int(row["acc_token_num"]) <= int(row["verify_token_num"]) == int(row["draft_token_num"]) + 1 <= 4
    for row in requests:
        mine, case = by_request[int(row["req_id"])], trace[int(row["req_id"])]
        length = int(row["response_length"])
        assert length == len(tokenizer.response(case["gen"])) == int(row["spec_accepted_total"])
        assert int(row["prompt_length"]) == len(tokenizer.prompt(case["prompt"]))
        assert sum(int(each["acc_token_num"]) for each in mine) == length
        assert len(mine) == int(row["rollout_step"])
        # What was emitted beyond one token a verification was drafted and agreed; the last may have been cut.
        assert 0 <= int(row["spec_matched_total"]) - (length - len(mine)) <= 1
        assert float(row["rollout_time"]) > 0
    assert sum(int(row["step_tokens"]) for row in perf) == sum(int(row["response_length"]) for row in requests)
    assert len({row["cur_step"] for row in markov}) == len([row for row in perf if int(row["step_tokens"])])
    for row in perf[1:]:
        interval_s = float(row["step_interval"]) / 1e3
        per_request = int(row["step_tokens"]) / max(int(row["step_batchsize"]), 1)
        assert float(row["step_tgs"]) == pytest.approx(per_request / interval_s, rel=1e-3)
    assert sum(float(row["step_interval"]) for row in perf) / 1e3 == pytest.approx(float(perf[-1]["step_ts"]), abs=0.05)
    keys = [(int(row["response_length"]), int(row["req_id"])) for row in requests]
    assert keys == sorted(keys)
    keys = [(int(row["req_id"]), int(row["cur_step"])) for row in markov]
    assert keys == sorted(keys)


def test_rounds_after_the_first_have_the_newest_weights(out: Path) -> None:
    reports = [json.loads((out / "step5" / f"round{number}" / "report.json").read_text()) for number in range(ROUNDS)]
    assert [(report["weights"], report["weights_fault"]) for report in reports] == [("0", ""), ("step-8", "")]


def test_the_report_calls_acceptance_what_it_is(out: Path) -> None:
    report = json.loads((out / "step5" / "round1" / "report.json").read_text())
    assert report["acceptance_is"] == "teacher_forced"
    assert report["teacher_forced_acceptance_length"] > 1
    assert "live_acceptance_length" not in report
    assert report["straggler"]["worker"] == 0
    assert [worker["worker"] for worker in report["workers"]] == [0]
    assert report["wall_s"] > 0
    assert "teacher-forced" in (out / "step5" / "round1" / "report.md").read_text()
