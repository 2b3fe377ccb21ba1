"""`outrider rollout` end to end on a real verifier (two: `tests/campaign`): files are where scripts look, numbers add up."""

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
from tests.support.fleet_process import ServedFleet, wait_for
from tests.support.processes import ENGINE_ENV, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

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


OWN = (
    {"stop": ["e"], "logprobs": 2, "structured_outputs": {"regex": "[abc]{1,8}e[abc]"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"seed": 11, "temperature": 1},
)
"""Sampling parameters of the first prompts."""


def test_a_fleet_that_is_joined_gives_each_prompt_its_own_sampling_and_new_weights(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # Sockets have short paths.
    tmp_path = tmp_path_factory.mktemp("j")
    trace, prompts = tmp_path / "train.5.parquet", tmp_path / "prompts.jsonl"
    made = outrider(tmp_path, "trace", "make", "stdlib", "--out", str(trace), "--limit", "4", "--max-prompt", "40")
    assert made.returncode == 0, made.stderr
    texts = [row["prompt"] for row in pq.read_table(trace).to_pylist()]
    lines = [{"prompt": text, "sampling_params": own} for text, own in zip(texts, (*OWN, {}), strict=True)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "step-8").symlink_to(TARGET_DIR)
    environment = ENGINE_ENV | {"XDG_RUNTIME_DIR": str(tmp_path)}
    fleet = ServedFleet("--verifiers", "2", "--drafters", "1", env=environment)
    try:
        wait_for(lambda: [each["state"] for each in fleet.fleet()["verifiers"]] == ["ready", "ready"], 120, "two verifiers")
        run = ["--join", str(fleet.process.pid), "--trace", str(trace), "--prompts", str(prompts), "--out", str(tmp_path)]
        run += ["--sampling", '{"max_tokens": 40}', "--temperature", "0.7", "--n", "2", "--repeat", "2"]
        done = outrider(tmp_path, "rollout", *run, "--weights-dir", str(tmp_path / "w"))
        assert done.returncode == 0, done.stderr
        asked = {"model": "demo", "prompt": texts[2], "max_tokens": 40, **OWN[2]}
        answer = fleet.http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        wait_for(lambda: fleet.http.get("/weight_info").json()["weight_version"] == "step-8", 30, "the gateway to know")
    finally:
        fleet.stop()
    for number, version in enumerate(("0", "step-8")):
        directory = tmp_path / "step5" / f"round{number}"
        assert json.loads((directory / "report.json").read_text())["weights"] == version
        rows = [json.loads(line) for line in (directory / "responses.jsonl").read_text().splitlines()]
        assert [row["req_id"] for row in rows] == list(range(8))
        lengths = {
            int(row["req_id"]): int(row["response_length"]) for each in (0, 1) for row in table(directory, each, "request")
        }
        assert lengths == {row["req_id"]: len(row["token_ids"]) for row in rows}
        for row in rows[:2]:
            assert "e" not in row["text"]
            assert (row["finish_reason"], row["stop_reason"]) == ("stop", "e")
            content = row["logprobs"]["content"]
            assert [each["token_id"] for each in content] == row["token_ids"]
            assert all(2 <= len(each["top_logprobs"]) <= 3 and each["logprob"] <= 0 for each in content)
        assert {row["text"] for row in rows[2:4]} <= {"yes", "no"}
        assert rows[4]["text"] == answer, "as a gateway answers with this seed"
        assert rows[5]["text"] != answer, "the second response has the next seed"
        assert all("logprobs" not in row for row in rows[2:])
    cases = pq.read_table(tmp_path / "cases" / "train.5.parquet").to_pylist()
    assert [case["gen"] for case in cases] == [row["text"] for row in rows]
