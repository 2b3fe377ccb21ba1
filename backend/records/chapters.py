"""Gathers the data of a report from records or from a rollout's tables: one chapter per period or round.

The command-line process.  Both sources are converted to the same tables first.  Columns of steps: `at` (s), `wall_ms`,
`tokens`, `requests`; of verifications: `request_id`, `step` and the fields of `summary.Outcome`; of requests: `tokens`,
`verifications`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from backend.records.reading import IDLE_COLUMNS, Incarnation, Records, RecordsError
from backend.records.summary import Outcomes, count_outcomes, step_wall_ms, total

Transitions = Counter[tuple[int, int]]
"""`[i, j]`: how often a verification that kept i draft tokens was followed, in the same request, by one that kept j."""


@dataclass
class Worker:
    """One verifier in a chapter.  Times in seconds since the chapter's start."""

    name: str
    steps: pa.Table
    verifications: pa.Table
    requests: pa.Table
    busy_s: float
    idle_s: dict[str, float]
    """By cause; all under `any cause` if the source does not distinguish causes."""
    began_s: float
    ended_s: float
    """When the verifier emitted its last token."""


@dataclass
class Chapter:
    """A recorded period, or one round of a rollout."""

    title: str
    workers: list[Worker]
    notes: list[str] = field(default_factory=list)

    @property
    def is_teacher_forced(self) -> bool:
        """Whether responses were fixed: then acceptance measures agreement with a trace."""
        return any(note is TEACHER_FORCED for note in self.notes)

    @property
    def outcomes(self) -> Outcomes:
        return sum((count_outcomes(worker.verifications) for worker in self.workers), Counter())

    def transitions(self) -> Transitions:
        """Counts over all workers."""
        return sum((transitions(worker.verifications) for worker in self.workers), Counter())

    def alone_s(self) -> dict[str, float]:
        """Seconds that each worker ran after all others had ended; 0 for every worker but the last."""
        ends = sorted((worker.ended_s for worker in self.workers), reverse=True)
        before = ends[1] if len(ends) > 1 else None
        return {
            worker.name: max(0.0, worker.ended_s - before) if before is not None and worker.ended_s == ends[0] else 0.0
            for worker in self.workers
        }


TEACHER_FORCED = (
    "Responses were fixed: acceptance here is teacher-forced (it measures agreement with the trace), no live figure."
)


def transitions(verifications: pa.Table) -> Transitions:
    """Pairs of consecutive verifications of a request that both had a draft."""
    if verifications.num_rows < 2:
        return Counter()
    ordered = verifications.select(["request_id", "step", "draft_tokens", "accepted"]).sort_by(
        [("request_id", "ascending"), ("step", "ascending")]
    )
    last, following = ordered.slice(0, len(ordered) - 1), ordered.slice(1)
    both = pc.and_(pc.greater(last["draft_tokens"], 0), pc.greater(following["draft_tokens"], 0))
    pairs = pa.table({"last": last["accepted"], "next": following["accepted"]}).filter(
        pc.and_(both, pc.equal(last["request_id"], following["request_id"]))
    )
    counted = pairs.group_by(["last", "next"]).aggregate([([], "count_all")]).to_pydict()
    return Counter(dict(zip(zip(counted["last"], counted["next"], strict=True), counted["count_all"], strict=True)))


# From records.


def recorded(records: Records) -> list[Chapter]:
    """One chapter: all incarnations on a common clock.

    Teacher-forced verifications are left out if there are live ones.  Raises `RecordsError` when there are no steps.
    """
    gathered = [(each, records.table(each, "step")) for each in records.incarnations]
    gathered = [(each, steps) for each, steps in gathered if steps.num_rows]
    if not gathered:
        raise RecordsError("nothing was recorded in this period")
    zero = min(pc.min(steps["began_at"]).as_py() for _, steps in gathered)
    restarted = len({each.verifier_id for each, _ in gathered}) < len(gathered)
    verified = [records.table(each, "verification") for each, _ in gathered]
    live = sum(total(pc.invert(table["teacher_forced"])) for table in verified)
    forced = sum(table.num_rows for table in verified) - live
    workers = [
        _incarnation(
            each,
            steps,
            table.filter(pc.equal(table["teacher_forced"], not live)),
            records.table(each, "request"),
            zero,
            restarted,
        )
        for (each, steps), table in zip(gathered, verified, strict=True)
    ]
    notes = [] if live or not forced else [TEACHER_FORCED]
    if live and forced:
        notes.append(f"{forced} verifications of fixed responses are left out of the acceptance figures.")
    dropped = sum(sum(each.books.dropped.values()) for each in records.incarnations)
    if dropped:
        notes.append(f"{dropped} rows of records were dropped while serving: sums are too small by them.")
    return [Chapter("Recorded period", workers, notes)]


def _incarnation(
    each: Incarnation, steps: pa.Table, verifications: pa.Table, requests: pa.Table, zero: float, restarted: bool
) -> Worker:
    at, busy_ms, tokens = (steps[name].to_numpy() for name in ("began_at", "busy_ms", "tokens"))
    at = at - zero
    about = each.books.about
    return Worker(
        name=f"{about.verifier_id} ({about.incarnation[:4]})" if restarted else about.verifier_id,
        steps=pa.table({"at": at, "wall_ms": step_wall_ms(steps), "tokens": tokens, "requests": steps["requests"]}),
        verifications=verifications,
        requests=requests.select(["tokens", "verifications"]),
        busy_s=float(busy_ms.sum()) / 1e3,
        idle_s={cause: total(steps[column]) / 1e3 for cause, column in IDLE_COLUMNS.items()},
        began_s=float(at.min()),
        ended_s=float((at + busy_ms / 1e3)[tokens > 0].max(initial=0.0)),
    )


# From a rollout.


def rounds(directory: Path) -> list[Path]:
    """The directories of rounds, in order: `directory` itself or directories up to two levels below it."""
    found = {file.parent for pattern in ("", "*/", "*/*/") for file in directory.glob(f"{pattern}worker_*_perf.csv")}
    return sorted(found, key=lambda each: _numbers(f"{each.parent.name}/{each.name}"))


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def rolled_out(directory: Path) -> list[Chapter]:
    """One chapter per round of a rollout.  Raises `RecordsError` when a table is missing or malformed."""
    return [_round(each) for each in rounds(directory)]


def _round(directory: Path) -> Chapter:
    told = _told(directory / "report.json")
    files = sorted(directory.glob("worker_*_perf.csv"), key=lambda file: _numbers(file.name))
    workers = [_worker(file, told) for file in files]
    notes = [TEACHER_FORCED] if told.get("acceptance_is") == "teacher_forced" else []
    if not any("finished_s" in each for each in told.get("workers", [])):
        notes.append("Each worker's clock starts with its own first step.")
    return Chapter(f"{directory.parent.name}, {directory.name}", [each for each in workers if each is not None], notes)


def _worker(perf: Path, told: dict[str, Any]) -> Worker | None:
    name = perf.name.removeprefix("worker_").removesuffix("_perf.csv")
    times = dict.fromkeys(("step_ts", "step_interval", "verify_time", "idle_time"), pa.float64())
    steps = _csv(perf, times | dict.fromkeys(("step_tokens", "step_batchsize"), pa.int64()))
    if not steps.num_rows:
        return None
    columns = ("acc_token_num", "draft_token_num", "cur_step", "req_id")
    markov = _csv(perf.with_name(f"worker_{name}_markov.csv"), dict.fromkeys(columns, pa.int64()))
    columns = ("req_id", "response_length", "rollout_step", "spec_matched_total")
    requests = _csv(perf.with_name(f"worker_{name}_request.csv"), dict.fromkeys(columns, pa.int64()))
    mine: dict[str, Any] = next((each for each in told.get("workers", []) if str(each.get("worker")) == name), {})
    at, interval = steps["step_ts"], steps["step_interval"]
    wall_ms = pc.if_else(pc.greater(interval, 0), interval, steps["verify_time"])
    length_s = pc.max(at).as_py() + wall_ms[-1].as_py() / 1e3
    ended_s = float(mine.get("finished_s", length_s))
    began_s = max(0.0, ended_s - length_s)
    idle_s = total(steps["idle_time"]) / 1e3
    return Worker(
        name=f"worker {name}",
        steps=pa.table(
            {
                "at": pc.add(at, began_s),
                "wall_ms": wall_ms,
                "tokens": steps["step_tokens"],
                "requests": steps["step_batchsize"],
            }
        ),
        verifications=_outcomes(markov, requests),
        requests=pa.table({"tokens": requests["response_length"], "verifications": requests["rollout_step"]}),
        busy_s=float(mine.get("busy_s", max(0.0, total(interval) / 1e3 - idle_s))),
        idle_s=mine.get("idle_s") or {"any cause": idle_s},
        began_s=began_s,
        ended_s=ended_s,
    )


def _outcomes(markov: pa.Table, requests: pa.Table) -> pa.Table:
    """A rollout's verifications, with the fields of `summary.Outcome`.

    A verification emits one token more than the draft tokens it keeps, except where the response ended within it.
    """
    drafted = pc.greater(markov["draft_token_num"], 0)
    kept = pc.max_element_wise(pc.subtract(markov["acc_token_num"], 1), 0)
    return pa.table(
        {
            "request_id": markov["req_id"],
            "step": markov["cur_step"],
            "drafter": pc.if_else(drafted, "all drafters", ""),
            "ahead": pa.repeat(pa.scalar(False), markov.num_rows),
            "draft_tokens": markov["draft_token_num"],
            "accepted": _with_what_was_cut(pc.if_else(drafted, kept, 0).to_pylist(), markov, requests),
        }
    )


def _with_what_was_cut(accepted: list[int], markov: pa.Table, requests: pa.Table) -> pa.Array:
    """Corrects each request's last verification, which the end of the response may have truncated.

    Its kept draft tokens are the request's total minus those of the request's other verifications.
    """
    last: dict[int, int] = {}
    missing = dict(zip(requests["req_id"].to_pylist(), requests["spec_matched_total"].to_pylist(), strict=True))
    steps, drafted = markov["cur_step"].to_pylist(), markov["draft_token_num"].to_pylist()
    for place, request in enumerate(markov["req_id"].to_pylist()):
        missing[request] = missing.get(request, 0) - accepted[place]
        if request not in last or steps[last[request]] < steps[place]:
            last[request] = place
    for request, place in last.items():
        if 0 < missing[request] <= drafted[place] - accepted[place]:
            accepted[place] += missing[request]
    return pa.array(accepted, pa.int64())


def _csv(file: Path, columns: Mapping[str, pa.DataType]) -> pa.Table:
    wanted = pyarrow.csv.ConvertOptions(include_columns=list(columns), column_types=columns)
    try:
        return pyarrow.csv.read_csv(file, convert_options=wanted)
    except FileNotFoundError as error:
        raise RecordsError(f"{file} is missing") from error
    except (OSError, pa.ArrowException) as error:
        raise RecordsError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _told(file: Path) -> dict[str, Any]:
    """The round's report, `{}` if there is none."""
    try:
        told = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RecordsError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    return told if isinstance(told, dict) else {}
