"""Tables made of rows: their columns are a contract.  (That they add up: `tests/integration/served/test_rollout.py`.)"""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from backend.records.kept import KeptRows, RowBatch
from backend.rollout import tables
from backend.rollout.outcome import Death, RoundResult, WorkerShare
from backend.rollout.report import round_report
from tests.support.recorded import request, step, verification


def test_a_first_step_follows_the_last_of_the_verifier_before_and_one_without_requests_divides_by_nothing() -> None:
    steps = [replace(step(n, 2.0 * n, requests=1, tokens=3), interval_ms=0.0) for n in range(2)]
    steps.append(step(2, 5.0, requests=0, tokens=0))
    _, _, first, empty = tables.of_worker(WorkerShare(0, RowBatch(steps)))["perf"].splitlines()
    assert first.startswith("1.500,3,3.000,1,2.000,2000.000,")
    assert empty.startswith("0.000,0,0.000,0,")


ABOUT = {"step": 3, "mode": "sync", "method": "eagle3", "k": 4, "model": "demo"}
ABOUT |= {"verifiers": 2, "drafters": 1, "fixed_responses": True, "temperature": 1.0}


def part(number: int, *lengths: int) -> WorkerShare:
    """A worker whose step n, a second long, verifies all of request `10 * number + n`."""
    made = WorkerShare(number)
    for n, tokens in enumerate(lengths):
        own = 10 * number + n
        begun = step(n, 1.0 + n, requests=1, tokens=tokens, awaiting_draft=0.5, no_work=0.25)
        made.rows.steps.append(replace(begun, interval_ms=1000.0))
        made.rows.verifications.append(verification(n, f"0-{own}-1", 4, tokens - 1, "d", teacher_forced=True))
        made.requests.append(request(str(own), 999.0, 1000.0, 1002.0, tokens))
    return made


def settled(*parts: WorkerShare, deaths: Sequence[Death] = ()) -> RoundResult:
    finished = RoundResult(0, 4.0, list(parts), deaths=list(deaths))
    for row in (row for each in parts for row in each.requests):
        output = SimpleNamespace(token_ids=[1] * row.tokens)
        finished.responses[int(row.request_id)] = SimpleNamespace(outputs=[output])
    finished.settle({f"0-{number}-1": number for number in range(100)})
    return finished


def test_tables_of_a_worker() -> None:
    """A verification of somebody else's request and the time before the first step are not of the round."""
    made = part(0, 5, 3)
    foreign = replace(made.rows.verifications[0], request_id="other")
    made.rows.verifications = [*reversed(made.rows.verifications), foreign]
    settled(made)
    assert {name: text.splitlines() for name, text in tables.of_worker(made).items()} == {
        "perf": [
            "step_tgs,step_tokens,cur_acc_len,step_batchsize,step_ts,step_interval,draft_nstep,draft_time,verify_time,idle_time",
            *("500.000,5,5.000,1,0.000,0.000,4,3.000,8.000,0.000", "3.000,3,3.000,1,1.000,1000.000,4,3.000,8.000,0.750"),
        ],
        "request": [
            "req_id,rollout_time,rollout_step,prompt_length,response_length,spec_accept_rate,spec_matched_total,"
            "spec_draft_total,spec_accepted_total",
            *("1,3000.000,1,10,3,0.500000,2,4,3", "0,3000.000,1,10,5,1.000000,4,4,5"),
        ],
        "markov": ["acc_token_num,draft_token_num,verify_token_num,cur_step,req_id", "5,4,5,0,0", "3,4,5,1,1"],
    }


def test_the_report_names_the_straggler_and_the_dead() -> None:
    report, text = round_report(settled(part(0, 5), part(1, 3, 2), deaths=[Death(1, "was lost", 1.5, 7)]), ABOUT)
    assert [each["worker"] for each in report["workers"]] == [0, 1]
    assert report["workers"][1]["steps"] == 2
    assert report["straggler"] == {"worker": 1, "finished_s": pytest.approx(1.01), "behind_the_others_s": pytest.approx(1.0)}
    assert report["workers"][1]["idle_s"]["awaiting_draft"] == 0.0005, "not what was before the round's first step"
    assert report["tokens_per_s"] == 2.5
    assert report["died"] == [{"worker": 1, "reason": "was lost", "at_s": 1.5, "requests_resumed": 7}]
    assert report["teacher_forced_acceptance_length"] == pytest.approx(1 + (2 + 4 + 1) / 3)
    assert "live_acceptance_length" not in report
    assert "teacher-forced" in text
    assert "worker 1 was lost" in text
    live, text = round_report(settled(part(0, 3)), ABOUT | {"fixed_responses": False})
    assert "teacher_forced_acceptance_length" not in live
    assert "Responses were free" in text


def test_the_report_sums_up_requests_and_steps() -> None:
    """A figure without a value is left out."""
    report, text = round_report(settled(part(0, 2, 4, 3)), ABOUT)
    names = ("response tokens", "seconds of a request", "requests in a step", "ms of a verification step")
    assert [report["summary"][name]["sum"] for name in names] == [9, 9.0, 3, 24.0]
    assert "|  | mean | least | 10 % | median | 90 % | most | sum |" in text
    assert "| response tokens | 3 | 2 | 2.2 | 3 | 3.8 | 4 | 9 |" in text
    made = part(0, 3)
    made.requests.clear()
    assert set(round_report(settled(made), ABOUT)[0]["summary"]) == {
        "TGS of a step", "requests in a step", "requests waiting", "share of the KV cache in use", "ms of a verification step"
    }  # fmt: skip


def test_requests_that_moved_are_summed_over_workers() -> None:
    first, second = part(0, 3), part(0, 2)
    second.number, second.rows.verifications = 1, [replace(row, request_id="0-0-2") for row in second.rows.verifications]
    first.requests.clear()
    finished = RoundResult(0, 4.0, [first, second])
    finished.settle({"0-0-1": 0, "0-0-2": 0})
    (row,) = second.requests
    assert (row.verifications, row.draft_tokens, row.accepted) == (2, 8, 3)
    assert first.requests == []


def test_rows_beyond_the_bound_are_counted() -> None:
    kept = KeptRows(1)
    for number in range(3):
        kept.put(step(number, 0.0))
    taken = kept.take()
    assert (len(taken), taken.lost) == (1, 2)
    assert (len(kept.take()), kept.take().lost) == (0, 0)
