"""Makes the three CSV tables of a worker: its steps, its requests and its verifications.  Pure.

Analysis scripts depend on names, columns, order, sorting and units.  Times are in milliseconds with three decimals, except
`step_ts`, which is in seconds; ids are numbers.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from backend.records.rows import StepRow
from backend.rollout.outcome import WorkerShare

Columns = Mapping[str, Callable[[Any], Any]]
"""By name, what a row of the records has in this column."""

PERF: Columns = {
    # TGS of a step = tokens / batch size / wall time.  The wall time of the first step is the step's own.
    "step_tgs": lambda step: _decimals(_ratio(step.tokens * 1e3, step.requests * (step.interval_ms or step.busy_ms))),
    "step_tokens": lambda step: step.tokens,
    "cur_acc_len": lambda step: _decimals(_ratio(step.drafted_tokens, step.drafted)),
    "step_batchsize": lambda step: step.requests,
    "step_ts": lambda step: _decimals(step.began_at),
    "step_interval": lambda step: _decimals(step.interval_ms),
    "draft_nstep": lambda step: step.plan_k,
    "draft_time": lambda step: _decimals(step.draft_ms),
    "verify_time": lambda step: _decimals(step.verify_ms),
    "idle_time": lambda step: _decimals(sum(step.idle_ms.values())),
}
REQUEST: Columns = {
    "req_id": lambda request: int(request.request_id),
    "rollout_time": lambda request: _decimals(1e3 * (request.ended_at - request.arrived_at)),
    "rollout_step": lambda request: request.verifications,
    "prompt_length": lambda request: request.prompt_tokens,
    "response_length": lambda request: request.tokens,
    "spec_accept_rate": lambda request: f"{_ratio(request.accepted, request.draft_tokens):.6f}",
    "spec_matched_total": lambda request: request.accepted,
    "spec_draft_total": lambda request: request.draft_tokens,
    "spec_accepted_total": lambda request: request.tokens,
}
MARKOV: Columns = {
    "acc_token_num": lambda verification: verification.tokens,
    "draft_token_num": lambda verification: verification.draft_tokens,
    "verify_token_num": lambda verification: verification.draft_tokens + 1,
    "cur_step": lambda verification: verification.step,
    "req_id": lambda verification: int(verification.request_id),
}


def of_worker(part: WorkerShare) -> dict[str, str]:
    """A worker's tables as CSV, by name."""
    return {
        "perf": _csv(PERF, _timed(part.rows.steps)),
        "request": _csv(REQUEST, sorted(part.requests, key=lambda row: (row.tokens, int(row.request_id)))),
        "markov": _csv(MARKOV, sorted(part.rows.verifications, key=lambda row: (int(row.request_id), row.step))),
    }


def _timed(steps: Sequence[StepRow]) -> list[StepRow]:
    """The steps, with `began_at` since the first one began.

    A restarted verifier's first step has an interval too, counted from the last step of its predecessor.
    """
    return [
        replace(
            step,
            began_at=step.began_at - steps[0].began_at,
            interval_ms=step.interval_ms or 1e3 * (step.began_at - previous.began_at),
        )
        for step, previous in zip(steps, [*steps[:1], *steps], strict=False)
    ]


def _csv(columns: Columns, rows: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *([cell(row) for cell in columns.values()] for row in rows)])
    return text.getvalue()


def _ratio(part: float, whole: float) -> float:
    """`part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def _decimals(value: float) -> str:
    return f"{value:.3f}"
