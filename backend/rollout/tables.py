"""Makes the three CSV tables of a worker: its steps, its requests and its verifications.  Pure.

Analysis scripts depend on names, columns, order, sorting and units.  Times are in milliseconds with three decimals, except
`step_ts`, which is in seconds; ids are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from backend.records.rows import RequestRow, StepRow, VerificationRow
from backend.rollout.outcome import Part, Round

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
    for place, step in enumerate(steps):
        interval_ms = 0.0
        if place:
            interval_ms = step.interval_ms or 1e3 * (step.began_at - steps[place - 1].began_at)
        wall_ms = interval_ms or step.busy_ms
        # Idle time before a round's first step does not belong to the round.
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


def whole_requests(finished: Round) -> dict[int, dict[int, RequestRow]]:
    """By worker and request number: one row per request that ended at the worker, with its counts summed over all workers.

    Rows that a verifier had not sent before it died are missing from the sums.
    """
    verified = finished.verifications()
    whole: dict[int, dict[int, RequestRow]] = {part.number: {} for part in finished.parts}
    for part in finished.parts:
        for row in part.rows.requests:
            if row.request_id not in part.completed:
                continue
            number = part.numbers[row.request_id]
            tokens = len(finished.tokens(number))
            if row.tokens != tokens:
                rows = verified.get(number, ())
                row = replace(
                    row,
                    arrived_at=finished.began[number],
                    tokens=tokens,
                    verifications=len(rows),
                    draft_tokens=sum(each.draft_tokens for each in rows),
                    accepted=sum(each.accepted for each in rows),
                )
            whole[part.number][number] = row
    return whole


def request_table(requests: Mapping[int, RequestRow]) -> Table:
    """One row per request, sorted by response length, then number."""
    rows: Table = [
        (
            number,
            _decimals(1e3 * (row.ended_at - row.arrived_at)),
            row.verifications,
            row.prompt_tokens,
            row.tokens,
            f"{ratio(row.accepted, row.draft_tokens):.6f}",
            row.accepted,
            row.draft_tokens,
            row.tokens,
        )
        for number, row in requests.items()
    ]
    return sorted(rows, key=lambda row: (row[4], row[0]))


def markov_table(verifications: Iterable[VerificationRow], numbers: Mapping[str, int]) -> Table:
    """One row per verification of the requests in `numbers`, sorted by request number, then step."""
    rows: Table = [
        (row.tokens, row.draft_tokens, row.draft_tokens + 1, row.step, numbers[row.request_id])
        for row in verifications
        if row.request_id in numbers
    ]
    return sorted(rows, key=lambda row: (row[4], row[3]))


def of_worker(part: Part, requests: Mapping[int, RequestRow]) -> dict[str, str]:
    """A worker's tables as CSV, by name; `requests` are the requests that ended there."""
    return {
        "perf": csv_text(PERF_COLUMNS, perf_table(part.rows.steps)),
        "request": csv_text(REQUEST_COLUMNS, request_table(requests)),
        "markov": csv_text(MARKOV_COLUMNS, markov_table(part.rows.verifications, part.numbers)),
    }


def csv_text(columns: Sequence[str], rows: Table) -> str:
    """A table as CSV; no value needs quoting."""
    return "".join(",".join(map(str, row)) + "\n" for row in (columns, *rows))


def ratio(part: float, whole: float) -> float:
    """`part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def _decimals(value: float) -> str:
    return f"{value:.3f}"
