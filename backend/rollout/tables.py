"""Makes the three CSV tables of a worker: its steps, its requests and its verifications.  Pure.

Analysis scripts depend on names, columns, order, sorting and units.  Times are in milliseconds with three decimals, except
`step_ts`, which is in seconds; ids are numbers.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from backend.records.rows import RequestRow, StepRow, VerificationRow
from backend.rollout.outcome import WorkerShare

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

    TGS of a step = tokens / batch size / wall time.  A step's wall time is the interval since the previous step began; for the
    first step it is the step's duration.  (A restarted verifier's first step has an interval too, counted from the last step of
    its predecessor.)  `cur_acc_len` is 0 in a step that verified no draft.
    """
    rows: Table = []
    for step, previous in zip(steps, [*steps[:1], *steps], strict=False):
        interval_ms = step.interval_ms or 1e3 * (step.began_at - previous.began_at)
        wall_ms = interval_ms or step.busy_ms
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
                _decimals(sum(step.idle_ms.values())),
            )
        )
    return rows


def request_table(requests: Iterable[RequestRow]) -> Table:
    """One row per request, sorted by response length, then number."""
    rows: Table = [
        (
            int(row.request_id),
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
    ]
    return sorted(rows, key=lambda row: (row[4], row[0]))


def markov_table(verifications: Iterable[VerificationRow]) -> Table:
    """One row per verification, sorted by request number, then step."""
    rows: Table = [(row.tokens, row.draft_tokens, row.draft_tokens + 1, row.step, int(row.request_id)) for row in verifications]
    return sorted(rows, key=lambda row: (row[4], row[3]))


def of_worker(part: WorkerShare) -> dict[str, str]:
    """A worker's tables as CSV, by name."""
    return {
        "perf": csv_text(PERF_COLUMNS, perf_table(part.rows.steps)),
        "request": csv_text(REQUEST_COLUMNS, request_table(part.requests)),
        "markov": csv_text(MARKOV_COLUMNS, markov_table(part.rows.verifications)),
    }


def csv_text(columns: Sequence[str], rows: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def ratio(part: float, whole: float) -> float:
    """`part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def _decimals(value: float) -> str:
    return f"{value:.3f}"
