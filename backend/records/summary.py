"""Summarises the rows of verifiers: lengths, speeds, acceptance and idle time.  Pure.

A summary is made of recorded periods and of the rounds of rollouts.  Acceptance is a ratio of sums, never a mean of ratios.
Verifications of fixed responses (teacher-forced) are counted apart from live ones.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.records.reading import IDLE_COLUMNS, Numbers, VerifierTables, waited_ms

NOT_SERVED = pa.array(["abort", "error"])
"""Finish reasons of requests that are left out of the speeds."""


class Drafting(msgspec.Struct, frozen=True):
    """Sums over verifications with a draft.  `*_by_position[i]` counts drafts that reached, or were accepted at, token i."""

    drafts: int
    draft_tokens: int
    accepted: int
    acceptance_length: float | None
    drafted_by_position: list[int]
    accepted_by_position: list[int]


class Spread(msgspec.Struct, frozen=True):
    """A distribution of one value per step or request."""

    count: int
    mean: float
    min: float
    p10: float
    median: float
    p90: float
    max: float
    sum: float


class WorkerSummary(msgspec.Struct, frozen=True):
    """One verifier.  `requests` ended there."""

    worker: int | str
    requests: int
    tokens: int
    steps: int
    batch_mean: float
    batch_max: int
    verifications: int
    drafts: int
    draft_tokens: int
    accepted: int
    verify_s: float
    draft_s: float
    busy_s: float
    idle_s: dict[str, float]
    finished_s: float
    """When its last verification ended, in seconds since the first step of all workers, by its host's clock."""


class Straggler(msgspec.Struct, frozen=True):
    """The worker that ended last; the others' end is their median."""

    worker: int | str
    finished_s: float
    behind_the_others_s: float


class Summary(msgspec.Struct, frozen=True):
    """Figures of a recorded period, or of a round of a rollout."""

    began_at: float
    """Unix seconds of the first step."""
    requests: int
    finish_reasons: dict[str, int]
    tokens: int
    live: Drafting
    ahead: Drafting
    """Live verifications whose draft was made ahead."""
    teacher_forced: Drafting
    by_drafter: dict[str, Drafting]
    """Live verifications; teacher-forced ones if there are no others."""
    straggler: Straggler
    workers: list[WorkerSummary]
    summary: dict[str, Spread]
    """Distributions over requests and steps; without values, a figure is left out."""


def summarise(workers: Sequence[VerifierTables]) -> Summary:
    """Sums up the rows of all workers, of which one at least has steps."""
    steps = pa.concat_tables(each.steps for each in workers)
    verifications = pa.concat_tables(each.verifications for each in workers)
    requests = pa.concat_tables(each.requests for each in workers)
    began_at = float(pc.min(steps["began_at"]).as_py())
    summaries = [_worker(each, began_at) for each in workers]
    live = verifications.filter(pc.invert(verifications["teacher_forced"]))
    return Summary(
        began_at=began_at,
        requests=requests.num_rows,
        finish_reasons={each["values"]: each["counts"] for each in requests["finish_reason"].value_counts().to_pylist()},
        tokens=sum(each.tokens for each in summaries),
        live=drafting(live),
        ahead=drafting(live.filter(live["ahead"])),
        teacher_forced=drafting(verifications.filter(verifications["teacher_forced"])),
        by_drafter=by_drafter(live if live.num_rows else verifications),
        straggler=_straggler(summaries),
        workers=summaries,
        summary=_figures(steps, requests),
    )


def drafting(verifications: pa.Table) -> Drafting:
    """Sums over the verifications that had a draft."""
    drafted = verifications.filter(pc.greater(verifications["draft_tokens"], 0))
    tokens, accepted = drafted["draft_tokens"].to_numpy(), drafted["accepted"].to_numpy()
    positions = range(tokens.max(initial=0))
    return Drafting(
        drafts=len(tokens),
        draft_tokens=int(tokens.sum()),
        accepted=int(accepted.sum()),
        acceptance_length=float(1 + accepted.mean()) if len(tokens) else None,
        drafted_by_position=[int((tokens > position).sum()) for position in positions],
        accepted_by_position=[int((accepted > position).sum()) for position in positions],
    )


def by_drafter(verifications: pa.Table) -> dict[str, Drafting]:
    """Sums over verifications with a draft, by drafter."""
    drafted = verifications.filter(pc.greater(verifications["draft_tokens"], 0))
    names = sorted(drafted["drafter"].unique().to_pylist())
    return {name: drafting(drafted.filter(pc.equal(drafted["drafter"], name))) for name in names}


def step_wall_ms(steps: pa.Table) -> Numbers:
    """A step's wall time: busy time, and idle time before it while there was work.  Time without work belongs to no step."""
    wall: Numbers = steps["busy_ms"].to_numpy() + waited_ms(steps)
    return wall


def request_speeds(requests: pa.Table) -> tuple[Numbers, Numbers]:
    """Decode and end-to-end speed, in tokens per second, of each request that was served to its end.

    Decode: (n - 1) / (last token - first token), over tokens emitted at this verifier.  End to end: n / (last token - arrival),
    tokens from earlier verifiers included.
    """
    served = pc.and_(pc.invert(pc.is_in(requests["finish_reason"], value_set=NOT_SERVED)), pc.greater(requests["tokens"], 0))
    requests = requests.filter(served)
    columns = ("tokens", "brought_tokens", "arrived_at", "first_token_at", "ended_at")
    tokens, brought, arrived, first, ended = (requests[name].to_numpy() for name in columns)
    several, late = (tokens > 1) & (ended > first), ended > arrived
    return (tokens - 1)[several] / (ended - first)[several], (tokens + brought)[late] / (ended - arrived)[late]


def _figures(steps: pa.Table, requests: pa.Table) -> dict[str, Spread]:
    emitting = steps.filter(pc.greater(steps["requests"], 0))
    begun = requests.filter(pc.and_(pc.greater(requests["first_token_at"], 0), pc.equal(requests["brought_tokens"], 0)))
    decode, end_to_end = request_speeds(requests)
    tokens, verifications = requests["tokens"].to_numpy(), requests["verifications"].to_numpy()
    values: dict[str, Numbers] = {
        "response tokens": tokens,
        "seconds of a request": requests["ended_at"].to_numpy() - requests["arrived_at"].to_numpy(),
        "seconds to the first token": begun["first_token_at"].to_numpy() - begun["arrived_at"].to_numpy(),
        "verifications": verifications,
        "tokens per verification": tokens / np.maximum(verifications, 1),
        "TGS of a request, decoding": decode,
        "TGS of a request, end to end": end_to_end,
        "TGS of a step": 1e3 * emitting["tokens"].to_numpy() / emitting["requests"].to_numpy() / step_wall_ms(emitting),
        "requests in a step": steps["requests"].to_numpy(),
        "requests waiting": steps["waiting"].to_numpy(),
        "share of the KV cache in use": steps["kv_usage"].to_numpy(),
        "ms of a verification step": steps["verify_ms"].to_numpy(),
    }
    return {name: _spread(each) for name, each in values.items() if len(each)}


def _spread(values: Numbers) -> Spread:
    p10, median, p90 = np.quantile(values, [0.1, 0.5, 0.9]).tolist()
    least, most = values.min().item(), values.max().item()
    return Spread(len(values), float(values.mean()), least, p10, median, p90, most, values.sum().item())


def _worker(worker: VerifierTables, zero: float) -> WorkerSummary:
    steps, drafted = worker.steps, drafting(worker.verifications)
    batches, busy_ms = steps["requests"].to_numpy(), steps["busy_ms"].to_numpy()
    batches = batches[batches > 0]
    verifying = np.isin(steps["step"].to_numpy(), worker.verifications["step"].to_numpy())
    ends = (steps["began_at"].to_numpy() + busy_ms / 1e3)[verifying]
    return WorkerSummary(
        worker=worker.name,
        requests=worker.requests.num_rows,
        tokens=int(total(worker.verifications["tokens"])),
        steps=steps.num_rows,
        batch_mean=float(batches.mean()) if len(batches) else 0.0,
        batch_max=int(batches.max(initial=0)),
        verifications=worker.verifications.num_rows,
        drafts=drafted.drafts,
        draft_tokens=drafted.draft_tokens,
        accepted=drafted.accepted,
        verify_s=total(steps["verify_ms"]) / 1e3,
        draft_s=total(steps["draft_ms"]) / 1e3,
        busy_s=float(busy_ms.sum()) / 1e3,
        idle_s={cause: total(steps[column]) / 1e3 for cause, column in IDLE_COLUMNS.items()}
        | {"no_work": worker.without_work_s},
        finished_s=float(ends.max(initial=zero) - zero),
    )


def _straggler(workers: Sequence[WorkerSummary]) -> Straggler:
    last = max(workers, key=lambda each: each.finished_s)
    others = [each.finished_s for each in workers if each is not last]
    return Straggler(last.worker, last.finished_s, last.finished_s - statistics.median(others) if others else 0.0)


def total(column: Any) -> Any:
    """The sum of a column; 0 for an empty one."""
    return pc.sum(column).as_py() or 0
