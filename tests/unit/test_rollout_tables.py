"""Tables made of rows: their columns are a contract, and their numbers add up whatever the rows were."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.records.kept import KeptRows, RowBatch
from backend.records.rows import RequestRow, StepRow, VerificationRow
from backend.rollout import tables
from backend.rollout.outcome import Death, Part, Round
from backend.rollout.report import ENOUGH, WORST, markdown, round_report

CONTRACT = {
    "perf": "step_tgs,step_tokens,cur_acc_len,step_batchsize,step_ts,step_interval,draft_nstep,"
    "draft_time,verify_time,idle_time",
    "request": "req_id,rollout_time,rollout_step,prompt_length,response_length,spec_accept_rate,spec_matched_total,"
    "spec_draft_total,spec_accepted_total",
    "markov": "acc_token_num,draft_token_num,verify_token_num,cur_step,req_id",
}


def step(number: int, verified: list[VerificationRow], began_at: float, interval_ms: float) -> StepRow:
    drafted = [row for row in verified if row.draft_tokens]
    return StepRow(
        step=number,
        began_at=began_at,
        interval_ms=interval_ms,
        requests=len(verified),
        prefill_tokens=0,
        tokens=sum(row.tokens for row in verified),
        drafted=len(drafted),
        drafted_tokens=sum(row.tokens for row in drafted),
        plan_k=4,
        plan_outcomes=0,
        draft_ms=1.25,
        verify_ms=2.5,
        busy_ms=4.0,
        idle_ms={"awaiting_draft": 0.5, "no_work": 0.25},
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[RowBatch, dict[str, int]]:
    """Requests of random lengths, verified in random steps; some of them are not this worker's to report."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    names = {f"0-{number}-1": number for number in range(len(lengths))}
    left = dict(zip(names, lengths, strict=True))
    made: dict[str, list[VerificationRow]] = defaultdict(list)
    kept = KeptRows(10_000)
    now, number = 1000.0, 7
    while left:
        ready = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        rows = []
        for name in ready:
            drafted = draw(st.integers(0, 4)) if made[name] else 0
            accepted = draw(st.integers(0, drafted))
            tokens = min(accepted + 1, left[name])
            row = VerificationRow(number, name, 5, drafted, accepted, tokens, "d" if drafted else "", False, True)
            made[name].append(row)
            rows.append(row)
            left[name] -= tokens
            if not left[name]:
                del left[name]
        interval_ms = draw(st.floats(0.5, 50.0))
        now += interval_ms / 1e3
        for row in rows:
            kept.put(row)
            if row.request_id not in left:
                mine = made[row.request_id]
                kept.put(
                    RequestRow(
                        request_id=row.request_id,
                        arrived_at=999.0,
                        first_token_at=1000.0,
                        ended_at=now,
                        prompt_tokens=5,
                        tokens=sum(each.tokens for each in mine),
                        verifications=len(mine),
                        draft_tokens=sum(each.draft_tokens for each in mine),
                        accepted=sum(each.accepted for each in mine),
                        finish_reason="length",
                        teacher_forced=True,
                    )
                )
        kept.put(step(number, rows, now, interval_ms))
        number += 1
    dropped = draw(st.sets(st.sampled_from(sorted(names)), max_size=2))
    return kept.take(), {name: number for name, number in names.items() if name not in dropped}


def read(columns: tuple[str, ...], rows: tables.Table) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(tables.csv_text(columns, rows))))


def test_columns_are_the_contract() -> None:
    assert ",".join(tables.PERF_COLUMNS) == CONTRACT["perf"]
    assert ",".join(tables.REQUEST_COLUMNS) == CONTRACT["request"]
    assert ",".join(tables.MARKOV_COLUMNS) == CONTRACT["markov"]


@given(batches())
def test_tables_add_up(made: tuple[RowBatch, dict[str, int]]) -> None:
    batch, names = made
    perf = read(tables.PERF_COLUMNS, tables.perf_table(batch.steps))
    requests = read(
        tables.REQUEST_COLUMNS,
        tables.request_table({names[each.request_id]: each for each in batch.requests if each.request_id in names}),
    )
    markov = read(tables.MARKOV_COLUMNS, tables.markov_table(batch.verifications, names))

    assert {int(row["req_id"]) for row in requests} == set(names.values())
    by_request: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in markov:
        by_request[row["req_id"]].append(row)
        assert int(row["verify_token_num"]) == int(row["draft_token_num"]) + 1
        assert 1 <= int(row["acc_token_num"]) <= int(row["verify_token_num"])
    for row in requests:
        mine = by_request[row["req_id"]]
        assert (
            sum(int(each["acc_token_num"]) for each in mine) == int(row["response_length"]) == int(row["spec_accepted_total"])
        )
        assert len(mine) == int(row["rollout_step"])
        assert sum(int(each["draft_token_num"]) for each in mine) == int(row["spec_draft_total"])
        drafted = int(row["spec_draft_total"])
        rate = int(row["spec_matched_total"]) / drafted if drafted else 0
        assert float(row["spec_accept_rate"]) == pytest.approx(rate, abs=1e-6)
    assert [(int(r["response_length"]), int(r["req_id"])) for r in requests] == sorted(
        (int(r["response_length"]), int(r["req_id"])) for r in requests
    )
    order = [(int(row["req_id"]), int(row["cur_step"])) for row in markov]
    assert order == sorted(order)
    assert len(set(order)) == len(order)

    assert len(perf) == len(batch.steps)
    tokens_by_step: dict[int, int] = defaultdict(int)
    for verification in batch.verifications:
        tokens_by_step[verification.step] += verification.tokens
    for place, (row, source) in enumerate(zip(perf, batch.steps, strict=True)):
        assert int(row["step_tokens"]) == tokens_by_step[source.step]
        wall_s = (float(row["step_interval"]) if place else source.busy_ms) / 1e3
        assert float(row["step_tgs"]) == pytest.approx(int(row["step_tokens"]) / int(row["step_batchsize"]) / wall_s, rel=1e-2)
        assert all(
            len(row[name].partition(".")[2]) == 3 for name in ("step_interval", "draft_time", "verify_time", "idle_time")
        )
    assert float(perf[0]["step_ts"]) == float(perf[0]["step_interval"]) == float(perf[0]["idle_time"]) == 0


def test_numbers_sort_as_numbers() -> None:
    rows = [VerificationRow(s, f"0-{n}-1", 5, 0, 0, 1, "", False, False) for n in (10, 9) for s in (11, 2)]
    table = tables.markov_table(rows, {"0-10-1": 10, "0-9-1": 9})
    assert [row[3:] for row in table] == [(2, 9), (11, 9), (2, 10), (11, 10)]


def test_the_first_step_of_a_verifier_that_came_back_follows_the_last_of_the_one_before() -> None:
    verified = VerificationRow(0, "0-1-1", 5, 0, 0, 3, "", False, False)
    rows = tables.perf_table([step(0, [verified], 100.0, 0.0), step(1, [verified], 102.0, 0.0)])
    assert rows[1][4:6] == ("2.000", "2000.000")
    assert rows[1][0] == "1.500"


def test_a_step_without_requests_or_drafts_is_no_division_by_zero() -> None:
    (row,) = tables.perf_table([step(0, [], 5.0, 0.0)])
    assert row[:4] == ("0.000", 0, "0.000", 0)


ABOUT = {
    "step": 3,
    "implementation": "disaggregated",
    "mode": "sync",
    "method": "eagle3",
    "k": 4,
    "model": "demo",
    "verifiers": 2,
    "drafters": 1,
    "fixed_responses": True,
    "temperature": 1.0,
}


def part(number: int, finished_s: float, tokens: int, first_step: int = 0) -> Part:
    name = f"0-{number}-{first_step}"
    verified = VerificationRow(first_step, name, 5, 4, tokens - 1, tokens, "d", False, True)
    rows = RowBatch(steps=[step(first_step, [verified], 1.0, 0.0)], verifications=[verified])
    return Part(number, rows, {name: number * 10 + first_step}, {name}, finished_s)


def responses(lengths: dict[int, int]) -> dict[int, Any]:
    return {number: SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * tokens)]) for number, tokens in lengths.items()}


def test_the_report_names_the_straggler_and_the_dead() -> None:
    came_back, before = part(1, 4.0, 3), part(1, 3.0, 2, first_step=1)
    came_back.rows.add(before.rows)
    came_back.numbers |= before.numbers
    came_back.completed |= before.completed
    finished = Round(0, 4.0, [part(0, 2.5, 5), came_back], responses({0: 5, 10: 3, 11: 2}), [Death(1, "died", 1.5, 7)])
    report = round_report(finished, ABOUT)
    assert [each["worker"] for each in report["workers"]] == [0, 1]
    assert report["workers"][1]["steps"] == 2
    assert report["straggler"] == {"worker": 1, "finished_s": 4.0, "behind_the_others_s": 1.5}
    assert report["tokens_per_s"] == 2.5
    assert report["died"][0]["requests_resumed"] == 7
    assert report["teacher_forced_acceptance_length"] == pytest.approx(1 + (2 + 4 + 1) / 3, abs=1e-3)
    text = markdown(report)
    assert "teacher-forced" in text
    assert "worker 1 died" in text


def test_live_and_teacher_forced_acceptance_never_share_a_name() -> None:
    finished = Round(0, 1.0, [part(0, 1.0, 3)], responses({0: 3}))
    forced, live = round_report(finished, ABOUT), round_report(finished, ABOUT | {"fixed_responses": False})
    assert "live_acceptance_length" not in forced
    assert "teacher_forced_acceptance_length" not in live
    assert "teacher-forced" not in markdown(live)


def drafted(draft_tokens: list[int], accepted: list[int]) -> Round:
    """A round of one worker whose request n has so many draft tokens, all of them in one verification."""
    rows, names = RowBatch(), {}
    for number, (drafts, agreed) in enumerate(zip(draft_tokens, accepted, strict=True)):
        names[f"0-{number}-1"] = number
        verified = VerificationRow(number, f"0-{number}-1", 5, drafts, agreed, agreed + 1, "d", False, True)
        rows.verifications.append(verified)
        rows.steps.append(step(number, [verified], number, 0.0))
        times = (10.0, 11.0, 12.0 + number)
        rows.requests.append(
            RequestRow(f"0-{number}-1", *times, 5, agreed + 1, 1, drafts, agreed, "length", teacher_forced=True)
        )
    whole = responses({number: agreed + 1 for number, agreed in enumerate(accepted)})
    return Round(0, 4.0, [Part(0, rows, names, set(names), 4.0)], whole)


def test_the_report_sums_up_requests_and_steps() -> None:
    report = round_report(drafted([4, 4, 4], [1, 3, 2]), ABOUT)
    assert report["summary"]["response tokens"] == {"mean": 3.0, "min": 2, "max": 4, "sum": 9}
    assert report["summary"]["seconds of a request"] == {"mean": 3.0, "min": 2.0, "max": 4.0, "sum": 9.0}
    assert report["summary"]["requests in a step"] == {"mean": 1.0, "min": 1, "max": 1, "sum": 3}
    assert report["summary"]["ms of a verification step"]["sum"] == 7.5
    assert set(report["summary"]) == {
        "response tokens", "seconds of a request", "verifications", "tokens per verification", "requests in a step",
        "requests waiting", "share of the KV cache in use", "ms of a verification step",
    }  # fmt: skip
    text = markdown(report)
    assert "|  | mean | least | most | sum |" in text
    assert "| response tokens | 3.00 | 2.00 | 4.00 | 9.0 |" in text


def test_a_figure_without_a_row_is_left_out_of_the_summary() -> None:
    assert set(round_report(Round(0, 1.0, [part(0, 1.0, 3)], responses({0: 3})), ABOUT)["summary"]) == {
        "requests in a step", "requests waiting", "share of the KV cache in use", "ms of a verification step"
    }  # fmt: skip


def test_the_requests_with_the_worst_drafts_come_first() -> None:
    """Ten at most, by the accepted share of their draft tokens; one with few draft tokens says nothing."""
    accepted = [15, 0, 8, 3, *range(4, 14)]
    report = round_report(drafted([ENOUGH - 1, ENOUGH - 1, *[ENOUGH] * 12], accepted), ABOUT)
    worst = report["worst_drafted"]
    assert len(worst) == WORST
    assert [each["request"] for each in worst[:3]] == [3, 4, 5]
    assert worst[0] == {"request": 3, "tokens": 4, "draft_tokens": ENOUGH, "accepted": 3}
    shares = [each["accepted"] / each["draft_tokens"] for each in worst]
    assert shares == sorted(shares)
    assert "| 3 | 4 | 16 | 19% |" in markdown(report)
    assert "Drafts agreed least" not in markdown(round_report(drafted([4], [1]), ABOUT))


def test_rows_beyond_the_bound_are_counted() -> None:
    kept = KeptRows(1)
    for number in range(3):
        kept.put(step(number, [], 0.0, 0.0))
    taken = kept.take()
    assert (len(taken), taken.lost) == (1, 2)
    assert (len(kept.take()), kept.take().lost) == (0, 0)
