"""The three tables of a worker: rows of its steps, requests and verifications as CSV.  Pure.

Names, columns, order, sorting and units are a contract with analysis scripts: times in milliseconds with three decimals
(`step_ts` in seconds), ids as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backend.records.rows import RequestRow, StepRow, VerificationRow

PERF_COLUMNS = (
    "step_tgs",
    "step_tokens",
    "cur_acc_len",
    "step_batchsize",
    "step_ts",
    "step_interval",
    "draft_nstep",
    "draft_time",
    "verify_time",
    "idle_time",
)
REQUEST_COLUMNS = (
    "req_id",
    "rollout_time",
    "rollout_step",
    "prompt_length",
    "response_length",
    "spec_accept_rate",
    "spec_matched_total",
    "spec_draft_total",
    "spec_accepted_total",
)
MARKOV_COLUMNS = ("acc_token_num", "draft_token_num", "verify_token_num", "cur_step", "req_id")

Table = list[tuple[Any, ...]]


def perf_table(steps: Sequence[StepRow]) -> Table:
    """One row per step, in order.

    TGS of a step = tokens / batch size / wall time, where a step's wall time is the interval since the step before began; the
    first has no interval, and its own duration takes that place.  (That of a verifier started again has one: its predecessor's
    last step came before it.)  `cur_acc_len` is 0 in a step that verified no draft.
    """
    rows: Table = []
    for place, step in enumerate(steps):
        interval_ms = 0.0
        if place:
            interval_ms = step.interval_ms or 1e3 * (step.began_at - steps[place - 1].began_at)
        wall_ms = interval_ms or step.busy_ms
        # Before the first step of a round there was nothing to do.
        idle_ms = sum(step.idle_ms.values()) if place else 0.0
        rows.append(
            (
                _decimals(ratio(step.tokens * 1e3, step.requests * wall_ms)),
                step.tokens,
                _decimals(ratio(step.drafted_tokens, step.drafted)),
                step.requests,
                _decimals(step.began_at - steps[0].began_at),
                _decimals(interval_ms),
                step.plan_k,
                _decimals(step.draft_ms),
                _decimals(step.verify_ms),
                _decimals(idle_ms),
            )
        )
    return rows


def request_table(requests: Iterable[RequestRow], numbers: Mapping[str, int]) -> Table:
    """One row per request in `numbers` (its id in the rows: its number), by length, then number."""
    rows: Table = [
        (
            numbers[row.request_id],
            _decimals(1e3 * (row.ended_at - row.arrived_at)),
            row.verifications,
            row.prompt_tokens,
            row.tokens,
            f"{ratio(row.accepted, row.draft_tokens):.6f}",
            row.accepted,
            row.draft_tokens,
            row.tokens,
        )
        for row in requests
        if row.request_id in numbers
    ]
    return sorted(rows, key=lambda row: (row[4], row[0]))


def markov_table(verifications: Iterable[VerificationRow], numbers: Mapping[str, int]) -> Table:
    """One row per verification of the requests in `numbers`, by number, then step."""
    rows: Table = [
        (row.tokens, row.draft_tokens, row.draft_tokens + 1, row.step, numbers[row.request_id])
        for row in verifications
        if row.request_id in numbers
    ]
    return sorted(rows, key=lambda row: (row[4], row[3]))


def csv_text(columns: Sequence[str], rows: Table) -> str:
    """A table as CSV; nothing in it needs quoting."""
    return "".join(",".join(map(str, row)) + "\n" for row in (columns, *rows))


def ratio(part: float, whole: float) -> float:
    """`part / whole`, 0 of nothing."""
    return part / whole if whole else 0.0


def _decimals(value: float) -> str:
    return f"{value:.3f}"
