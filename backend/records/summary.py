"""Summarises records: lengths, speeds and idle time over a period.  The command-line process.

Sums are gathered file by file and divided at the end, so that a summary needs little memory and never averages ratios.
Verifications of fixed responses (teacher-forced) are counted apart from live ones.
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.records.reading import IDLE_COLUMNS, Numbers, Records, waited_ms

NOT_SERVED = pa.array(["abort", "error"])
"""Finish reasons of requests that are left out of the speeds."""


class Outcome(NamedTuple):
    """The fields of a verification by which verifications are grouped and counted."""

    drafter: str
    ahead: bool
    draft_tokens: int
    accepted: int


Outcomes = Counter[Outcome]


class Drafting(msgspec.Struct, frozen=True):
    """Sums over verifications with a draft.  `*_by_position[i]` counts drafts that reached, or were accepted at, token i."""

    drafts: int
    draft_tokens: int
    accepted: int
    acceptance_length: float | None
    acceptance_rate: float | None
    drafted_by_position: list[int]
    accepted_by_position: list[int]


class Spread(msgspec.Struct, frozen=True):
    """Quantiles of a distribution; None without values."""

    count: int
    p10: float | None
    median: float | None
    p90: float | None


class Summary(msgspec.Struct, frozen=True):
    """Summary of the selected records.  Times in seconds, speeds in tokens per second."""

    verifiers: list[str]
    incarnations: int
    first_at: float | None
    last_at: float | None
    steps: int
    tokens: int
    prefill_tokens: int
    mean_batch: float | None
    busy_s: float
    verify_s: float
    idle_s: dict[str, float]
    tgs_step: Spread
    tgs_decode: Spread
    tgs_e2e: Spread
    time_to_first_token_s: Spread
    response_tokens: Spread
    requests: dict[str, int]
    verifications: int
    live: Drafting
    by_drafter: dict[str, Drafting]
    ahead: Drafting
    """Live verifications whose draft was made ahead."""
    teacher_forced: Drafting
    decisions: int
    written: dict[str, int]
    dropped: dict[str, int]
    removed: dict[str, int]
    unreadable_files: int


def drafting(outcomes: Outcomes) -> Drafting:
    """Sums over the verifications that had a draft."""
    drafted = {outcome: n for outcome, n in outcomes.items() if outcome.draft_tokens}
    drafts = sum(drafted.values())
    tokens = sum(outcome.draft_tokens * n for outcome, n in drafted.items())
    accepted = sum(outcome.accepted * n for outcome, n in drafted.items())
    longest = max((outcome.draft_tokens for outcome in drafted), default=0)
    return Drafting(
        drafts=drafts,
        draft_tokens=tokens,
        accepted=accepted,
        acceptance_length=1 + accepted / drafts if drafts else None,
        acceptance_rate=accepted / tokens if tokens else None,
        drafted_by_position=[sum(n for o, n in drafted.items() if o.draft_tokens > p) for p in range(longest)],
        accepted_by_position=[sum(n for o, n in drafted.items() if o.accepted > p) for p in range(longest)],
    )


def count_outcomes(table: pa.Table) -> Outcomes:
    counted = table.group_by(list(Outcome._fields)).aggregate([([], "count_all")]).to_pydict()
    keys = zip(*(counted[name] for name in Outcome._fields), strict=True)
    return Counter({Outcome(*key): n for key, n in zip(keys, counted["count_all"], strict=True)})


def by_drafter(outcomes: Outcomes) -> dict[str, Drafting]:
    """Sums over verifications with a draft, by drafter."""
    names = sorted({outcome.drafter for outcome in outcomes if outcome.draft_tokens})
    return {name: drafting(Counter({each: n for each, n in outcomes.items() if each.drafter == name})) for name in names}


def spread(values: Numbers) -> Spread:
    """Quantiles of the finite values."""
    values = values[np.isfinite(values)]
    if not len(values):
        return Spread(0, None, None, None)
    return Spread(len(values), *np.quantile(values, [0.1, 0.5, 0.9]).tolist())


def step_wall_ms(steps: pa.Table) -> Numbers:
    """A step's wall time: busy time, and idle time before it while there was work.  Time without work belongs to no step."""
    wall: Numbers = steps["busy_ms"].to_numpy() + waited_ms(steps)
    return wall


def step_speeds(steps: pa.Table) -> Numbers:
    """Tokens per second and request of each step that emitted any: tokens / batch size / wall time."""
    steps = steps.filter(pc.greater(steps["requests"], 0))
    return _rate(steps["tokens"].to_numpy() / steps["requests"].to_numpy(), step_wall_ms(steps) / 1e3)


def request_speeds(requests: pa.Table) -> tuple[Numbers, Numbers]:
    """Decode and end-to-end speed, in tokens per second, of each request that was served to its end.

    Decode: (n - 1) / (last token - first token), over tokens emitted at this verifier.  End to end: n / (last token - arrival),
    tokens from earlier verifiers included.
    """
    served = pc.and_(
        pc.invert(pc.is_in(requests["finish_reason"], value_set=NOT_SERVED)),
        pc.greater(requests["tokens"], 0),
    )
    requests = requests.filter(served)
    columns = ("tokens", "brought_tokens", "arrived_at", "first_token_at", "ended_at")
    tokens, brought, arrived, first, ended = (requests[name].to_numpy() for name in columns)
    several, late = (tokens > 1) & (ended > first), ended > arrived
    return _rate((tokens - 1)[several], (ended - first)[several]), _rate((tokens + brought)[late], (ended - arrived)[late])


def _rate(tokens: Numbers, seconds: Numbers) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        return tokens / seconds


class _Sums:
    """Running sums while files are read."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.reasons: Counter[str] = Counter()
        self.times: list[float] = []
        self.live: Outcomes = Counter()
        self.forced: Outcomes = Counter()
        self.spreads: defaultdict[str, list[Numbers]] = defaultdict(list)
        self.without_work_s = 0.0

    def steps(self, steps: pa.Table) -> None:
        for name in ("tokens", "prefill_tokens", "requests"):
            self.numbers[name] += total(steps[name])
        self.numbers["steps"] += len(steps)
        self.numbers["emitting"] += total(pc.greater(steps["requests"], 0))
        for name in ("busy_ms", "verify_ms", *IDLE_COLUMNS.values()):
            self.seconds[name] += total(steps[name]) / 1e3
        bounds = pc.min_max(steps["began_at"]).as_py()
        self.times += [bounds["min"], bounds["max"]]
        self.spreads["tgs_step"].append(step_speeds(steps))

    def verifications(self, rows: pa.Table) -> None:
        self.numbers["verifications"] += len(rows)
        self.forced += count_outcomes(rows.filter(rows["teacher_forced"]))
        self.live += count_outcomes(rows.filter(pc.invert(rows["teacher_forced"])))

    def requests(self, requests: pa.Table) -> None:
        for reason in pc.value_counts(requests["finish_reason"]).to_pylist():
            self.reasons[reason["values"]] += reason["counts"]
        decode, e2e = request_speeds(requests)
        self.spreads["tgs_decode"].append(decode)
        self.spreads["tgs_e2e"].append(e2e)
        begun = requests.filter(pc.and_(pc.greater(requests["tokens"], 0), pc.equal(requests["brought_tokens"], 0)))
        self.spreads["ttft"].append(begun["first_token_at"].to_numpy() - begun["arrived_at"].to_numpy())
        self.spreads["response"].append(requests["tokens"].to_numpy())

    def spread(self, name: str) -> Spread:
        return spread(np.concatenate(self.spreads[name] or [np.empty(0)]))


def summarise(records: Records) -> Summary:
    """Reads all selected rows and sums them up.

    Every time is assigned to the period by its step, except time without work: hours of it may lie between two steps, so
    only its part within the period is counted.
    """
    sums = _Sums()
    for incarnation in records.incarnations:
        for table in records.tables(incarnation, "step"):
            sums.steps(table)
        if records.selection.is_timed:
            sums.without_work_s += records.without_work_s(incarnation)
        for table in records.tables(incarnation, "verification"):
            sums.verifications(table)
        for table in records.tables(incarnation, "request"):
            sums.requests(table)
        for table in records.tables(incarnation, "decision"):
            sums.numbers["decisions"] += len(table)
    numbers, seconds = sums.numbers, sums.seconds
    idle_s: dict[str, float] = {cause: seconds[column] for cause, column in IDLE_COLUMNS.items()}
    if records.selection.is_timed:
        idle_s["no_work"] = sums.without_work_s
    books = [incarnation.books for incarnation in records.incarnations]
    return Summary(
        verifiers=sorted({each.about.verifier_id for each in books}),
        incarnations=len(books),
        first_at=min(sums.times, default=None),
        last_at=max(sums.times, default=None),
        steps=numbers["steps"],
        tokens=numbers["tokens"],
        prefill_tokens=numbers["prefill_tokens"],
        mean_batch=numbers["requests"] / numbers["emitting"] if numbers["emitting"] else None,
        busy_s=seconds["busy_ms"],
        verify_s=seconds["verify_ms"],
        idle_s=idle_s,
        tgs_step=sums.spread("tgs_step"),
        tgs_decode=sums.spread("tgs_decode"),
        tgs_e2e=sums.spread("tgs_e2e"),
        time_to_first_token_s=sums.spread("ttft"),
        response_tokens=sums.spread("response"),
        requests=dict(sums.reasons),
        verifications=numbers["verifications"],
        live=drafting(sums.live),
        by_drafter=by_drafter(sums.live),
        ahead=drafting(Counter({outcome: n for outcome, n in sums.live.items() if outcome.ahead})),
        teacher_forced=drafting(sums.forced),
        decisions=numbers["decisions"],
        written=_together(each.written for each in books),
        dropped=_together(each.dropped for each in books),
        removed=_together(each.removed for each in books),
        unreadable_files=len(records.unreadable),
    )


def total(column: Any) -> Any:
    """The sum of a column; 0 for an empty one."""
    return pc.sum(column).as_py() or 0


def _together(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    together: Counter[str] = Counter()
    for each in counts:
        together.update(each)
    return dict(together)


def lines(summary: Summary) -> list[str]:
    wall = summary.busy_s + sum(summary.idle_s.values())
    verifiers = ", ".join(summary.verifiers)
    result = [f"verifiers       {verifiers} ({summary.incarnations} incarnation{'s' if summary.incarnations != 1 else ''})"]
    if not summary.steps:
        result.append("nothing was recorded in this period")
    else:
        result += [
            f"period          {_utc(summary.first_at)} to {_utc(summary.last_at)}",
            f"steps           {summary.steps}, {summary.tokens} tokens, {summary.prefill_tokens} prompt tokens, "
            f"mean batch {_number(summary.mean_batch)}",
            f"busy            {summary.busy_s:.1f} s ({_share(summary.busy_s, wall)}), verifying {summary.verify_s:.1f} s",
            "idle            "
            + ", ".join(f"{cause} {idle:.1f} s ({_share(idle, wall)})" for cause, idle in summary.idle_s.items() if idle),
        ]
        result += _speed_lines(summary)
        result += _drafting_lines(summary)
    lost = {kind: n for kind, n in summary.dropped.items() if n}
    result.append("rows dropped    " + (", ".join(f"{kind} {n}" for kind, n in lost.items()) or "none"))
    removed = sum(summary.removed.values())
    if removed:
        result.append(f"rows deleted    {removed} (oldest files, to stay within records.max_mib)")
    if summary.unreadable_files:
        result.append(f"unreadable      {summary.unreadable_files} files were skipped")
    return result


def _speed_lines(summary: Summary) -> list[str]:
    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(summary.requests.items()))
    names = ("decode", "e2e", "step"), (summary.tgs_decode, summary.tgs_e2e, summary.tgs_step)
    return [
        f"requests        {sum(summary.requests.values())} ({reasons})" if reasons else "requests        none ended",
        *(f"TGS {name:<12}{_spread_text(each, 'tokens/s')}" for name, each in zip(*names, strict=True)),
        f"first token     {_spread_text(summary.time_to_first_token_s, 's')}",
        f"response        {_spread_text(summary.response_tokens, 'tokens')}",
    ]


def _drafting_lines(summary: Summary) -> list[str]:
    result = []
    parts = [("drafts", summary.live), *((f"  by {name}", each) for name, each in summary.by_drafter.items())]
    parts += [("  made ahead", summary.ahead), ("teacher-forced", summary.teacher_forced)]
    for name, each in parts:
        if each.drafts:
            result.append(
                f"{name:<15} {each.drafts}, acceptance length {_number(each.acceptance_length)}, "
                f"rate {_number(each.acceptance_rate)} ({_positions(each)})"
            )
    return result or ["drafts          none"]


def _positions(part: Drafting) -> str:
    pairs: Sequence[tuple[int, int]] = list(zip(part.accepted_by_position, part.drafted_by_position, strict=True))
    return "by position " + " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in pairs)


def _spread_text(each: Spread, unit: str) -> str:
    if each.median is None:
        return "-"
    return f"median {_number(each.median)} {unit} (10 % {_number(each.p10)}, 90 % {_number(each.p90)}; n {each.count})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _utc(moment: float | None) -> str:
    if moment is None:
        return "-"
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
