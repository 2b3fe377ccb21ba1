"""What real verifiers write down adds up: to what the client received, to their counters, and to wall time."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vllm.sampling_params import SamplingParams

from backend.fleet import VerifierStats
from backend.records.rows import REQUEST_ID_KEY
from tests.support.processes import Verifier
from tests.support.scripted_drafter import ScriptedDrafter

pytestmark = pytest.mark.engine

PROMPTS = [[5 + (7 * i + j) % 900 for j in range(8 + 30 * i)] for i in range(4)]


def sampling(i: int, stop: int | None = None) -> SamplingParams:
    """Of the prompt `i`; the last one stops at this token."""
    stops = None if stop is None or i < 3 else [stop]
    extra = {REQUEST_ID_KEY: f"case-{i}"}
    return SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True, stop_token_ids=stops, extra_args=extra)


class Run:
    """What a verifier was asked, what came back, and what it wrote down."""

    def __init__(self, directory: Path, verifier: Verifier, stop: int) -> None:
        """All prompts, and one request whose client leaves."""
        self._directory = directory
        client = verifier.client
        for i, prompt in enumerate(PROMPTS):
            client.add(prompt, sampling(i, stop), f"case-{i}-suffix")
        client.finish_all()
        left = client.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True), "left-early")
        client.run_until(lambda: len(client.answers[left].tokens) > 5)
        client.abort(left)
        self.stats: VerifierStats = client.fresh_stats()
        client.receive()
        self.answers = {request_id.removesuffix("-suffix"): each.tokens for request_id, each in client.answers.items()}

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Rows of one kind."""
        files = sorted(self._directory.rglob(f"{kind}-*.parquet"))
        return pa.concat_tables(pq.read_table(file) for file in files).to_pylist()


@pytest.fixture(scope="module")
def run(plain: Verifier, directory: Path) -> Run:
    """Drafts of four tokens of which the third is wrong; one request stops inside a draft.

    The verifier has ended: files are whole then.
    """
    answers = [each.tokens for each in plain.client.generate(PROMPTS, [sampling(i) for i in range(len(PROMPTS))])]

    def oracle(tokens: list[int], k: int) -> list[int]:
        texts = (prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True))
        text = next((text for text in texts if text[: len(tokens)] == tokens), [])
        draft = text[len(tokens) : len(tokens) + k]
        return [(token + (i == 2)) % 900 for i, token in enumerate(draft)]

    limits = {"engine_args": {"max_num_batched_tokens": 64}, "max_num_seqs": 8, "lookup": False}
    settings = {"mode": "sync", "num_speculative_tokens": 4, "verifier": limits, "records": {"dir": str(directory)}}
    address = f"ipc://{directory}/d{os.urandom(3).hex()}.sock"
    with ScriptedDrafter(address, oracle) as drafter, Verifier(directory, settings) as verifier:
        verifier.set_drafters(drafter.ref)
        verifier.client.run_until(lambda: drafter.is_listened_to)
        return Run(directory, verifier, answers[3][10])


def test_every_token_the_client_got_is_in_a_verification(run: Run) -> None:
    tokens: Counter[str] = Counter()
    lengths: dict[str, int] = {}
    for row in run.read("verification"):
        assert lengths.get(row["request_id"], row["base_len"]) == row["base_len"], "rows follow each other without a gap"
        tokens[row["request_id"]] += row["tokens"]
        lengths[row["request_id"]] = row["base_len"] + row["tokens"]
    received = {name: len(answer) for name, answer in run.answers.items()}
    assert {name: tokens[name] for name in received if name != "left-early"} == {
        name: n for name, n in received.items() if name != "left-early"
    }
    assert tokens["left-early"] >= received["left-early"] > 5
    requests = {row["request_id"]: row for row in run.read("request")}
    assert {name: row["tokens"] for name, row in requests.items()} == tokens
    assert requests["left-early"]["finish_reason"] == "abort"
    assert requests["case-0"]["finish_reason"] == "length"
    for i, prompt in enumerate(PROMPTS):
        row = requests[f"case-{i}"]
        assert row["prompt_tokens"] == len(prompt)
        assert row["arrived_at"] < row["first_token_at"] < row["ended_at"]


def test_rows_add_up_to_the_counters(run: Run) -> None:
    stats, steps, verifications = run.stats, run.read("step"), run.read("verification")
    requests = run.read("request")
    assert [row["step"] for row in steps] == list(range(len(steps)))
    assert len(steps) == stats.steps
    assert sum(row["tokens"] for row in steps) == sum(row["tokens"] for row in verifications) == stats.tokens
    assert sum(row["requests"] for row in steps) == len(verifications) == stats.verifications
    assert sum(row["prefill_tokens"] for row in steps) == sum(map(len, PROMPTS)) + len(PROMPTS[0])
    assert Counter(row["finish_reason"] for row in requests) == stats.requests_finished
    drafted = [row for row in verifications if row["draft_tokens"]]
    counters = stats.drafters["drafter-0"]
    assert len(drafted) == counters.drafts == sum(row["drafted"] for row in steps)
    assert {row["drafter"] for row in drafted} == {"drafter-0"}
    assert max(row["draft_ms"] for row in steps) > 0
    assert sum(row["accepted"] for row in drafted) == counters.accepted_tokens
    assert sum(row["verifications"] for row in requests) == len(verifications)
    by_step: Counter[int] = Counter()
    for row in verifications:
        by_step[row["step"]] += row["tokens"]
    assert {row["step"]: row["tokens"] for row in steps if row["tokens"]} == by_step


def test_busy_and_idle_of_all_steps_are_the_wall_time(run: Run) -> None:
    steps = run.read("step")
    first, last = steps[0], steps[-1]
    intervals = sum(row["interval_ms"] for row in steps)
    assert intervals == pytest.approx(1e3 * (last["began_at"] - first["began_at"]), abs=100)
    # Intervals lie between beginnings of steps, busy and idle time between their ends: only the two steps at the ends differ.
    accounted = sum(row["busy_ms"] + sum(row["idle_ms"].values()) for row in steps[1:])
    assert last["verify_ms"] - first["busy_ms"] <= accounted - intervals <= last["busy_ms"] - first["verify_ms"]
    counted = 1e3 * (run.stats.busy_s + sum(run.stats.idle_s.values()))
    assert accounted < counted, "the counters went on after the last step"
    assert all(0 <= row["verify_ms"] <= row["busy_ms"] for row in steps)
