"""`outrider rollout` that joins a fleet: files are where scripts look, numbers add up, prompts have sampling of their own.

`tests/campaign/test_rollout.py` has one with a fleet of its own, and fixed responses.
"""

import csv
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from backend.models.demo import TARGET_DIR
from backend.rollout.requests import Tokenizer
from backend.rollout.tables import MARKOV, PERF, REQUEST
from backend.rollout.trace import Case, write_cases
from tests.support.fleet_process import ServedFleet, outrider
from tests.support.processes import ENGINE_ENV

pytestmark = pytest.mark.engine

TRACE = "train.5.parquet"
OWN: tuple[dict[str, Any], ...] = (
    {"stop": ["e"], "logprobs": 2, "structured_outputs": {"regex": "[abc]{1,8}e[abc]"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"seed": 11, "temperature": 1},
    {},
)
"""Sampling parameters of the prompts."""
CASES = [Case(number, f"def part_{number}(lines):\n    ", "return lines") for number in range(len(OWN))]
SAMPLES, ROUNDS = 2, 2
COLUMNS = {"perf": PERF, "request": REQUEST, "markov": MARKOV}


def table(directory: Path, worker: int, name: str) -> list[dict[str, str]]:
    with (directory / f"worker_{worker}_{name}.csv").open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        assert reader.fieldnames == [*COLUMNS[name]]
        return list(reader)


@pytest.fixture(scope="module")
def out(fleet: ServedFleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("r")
    write_cases(directory / TRACE, CASES)
    prompts = directory / "prompts.jsonl"
    lines = [{"prompt": case.prompt, "sampling_params": own} for case, own in zip(CASES, OWN, strict=True)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ["--join", str(fleet.process.pid), "--trace", str(directory / TRACE), "--prompts", str(prompts)]
    run += ["--out", str(directory), "--sampling", '{"max_tokens": 40}', "--temperature", "0.7", "--n", str(SAMPLES)]
    run += ["--repeat", str(ROUNDS)]
    work = outrider("rollout", *run, env=os.environ | ENGINE_ENV)
    output, _ = work.communicate(timeout=240)
    assert work.returncode == 0, output
    return directory


def responses(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "responses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_tables_add_up(out: Path, number: int) -> None:
    directory = out / "step5" / f"round{number}"
    tokenizer, rows = Tokenizer(str(TARGET_DIR)), responses(directory)
    seen: list[int] = []
    for worker in (0, 1):
        perf, requests, markov = (table(directory, worker, name) for name in COLUMNS)
        seen += [int(row["req_id"]) for row in requests]
        by_request: dict[int, list[dict[str, str]]] = defaultdict(list)
        for row in markov:
            by_request[int(row["req_id"])].append(row)
            assert int(row["acc_token_num"]) <= int(row["verify_token_num"]) == int(row["draft_token_num"]) + 1 <= 9
        for row in requests:
            number = int(row["req_id"])
            mine, length = by_request[number], int(row["response_length"])
            assert length == len(rows[number]["token_ids"]) == int(row["spec_accepted_total"])
            assert int(row["prompt_length"]) == len(tokenizer.encode_prompt(CASES[number // SAMPLES].prompt))
            emitted = sum(int(each["acc_token_num"]) for each in mine)
            # Tokens behind a stop string were emitted, and are no part of the response.
            assert emitted == length or (emitted > length and rows[number]["stop_reason"] == "e")
            assert len(mine) == int(row["rollout_step"])
            # What was emitted beyond one token a verification was drafted and agreed; the last may have been cut.
            assert 0 <= int(row["spec_matched_total"]) - (emitted - len(mine)) <= int(mine[-1]["draft_token_num"])
            assert float(row["rollout_time"]) > 0
        assert sum(int(row["step_tokens"]) for row in perf) == sum(int(row["acc_token_num"]) for row in markov)
        assert len({row["cur_step"] for row in markov}) == len([row for row in perf if int(row["step_tokens"])])
    assert sorted(seen) == [row["req_id"] for row in rows] == list(range(SAMPLES * len(CASES)))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_prompt_has_its_own_sampling(fleet: ServedFleet, out: Path, number: int) -> None:
    directory = out / "step5" / f"round{number}"
    version = fleet.http.get("/weight_info").json()["weight_version"]
    report = json.loads((directory / "report.json").read_text())
    assert (report["weights"], report["acceptance_is"]) == (version, "live")
    rows = responses(directory)
    for row in rows[:2]:
        assert "e" not in row["text"]
        assert (row["finish_reason"], row["stop_reason"]) == ("stop", "e")
        content = row["logprobs"]["content"]
        assert [each["token_id"] for each in content] == row["token_ids"]
        assert all(2 <= len(each["top_logprobs"]) <= 3 and each["logprob"] <= 0 for each in content)
    assert {row["text"] for row in rows[2:4]} <= {"yes", "no"}
    assert all("logprobs" not in row for row in rows[2:])
    answer = fleet.complete(CASES[2].prompt, max_tokens=40, **OWN[2])["choices"][0]["text"]
    assert rows[4]["text"] == answer, "as a gateway answers with this seed"
    assert rows[5]["text"] != answer, "the second response has the next seed"


def test_the_cases_are_the_last_rounds(out: Path) -> None:
    written, trace = pq.read_table(out / "cases" / TRACE), pq.read_table(out / TRACE).to_pylist()
    assert written.column_names == ["id", "prompt", "gen"]
    rows = responses(out / "step5" / f"round{ROUNDS - 1}")
    assert written.column("gen").to_pylist() == [row["text"] for row in rows]
    assert written.column("prompt").to_pylist() == [case["prompt"] for case in trace for _ in range(SAMPLES)]
