"""The report of a round: what each worker did, which worker was last, and how well drafts were accepted.  Pure.

Figures are sums of counters, never averages of ratios.  With fixed responses, acceptance is agreement with a trace.  It is
called *teacher-forced* and has fields of its own, so that it is not taken for a live figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from backend.records.rows import RequestRow, StepRow
from backend.rollout.outcome import Part, Round
from backend.rollout.tables import ratio, whole_requests

WORST = 10
ENOUGH = 16
"""Draft tokens that a request must have to be listed among the worst drafted; shares of fewer are mostly chance."""
LIVE, FORCED = "live", "teacher_forced"


def round_report(finished: Round, about: dict[str, Any], weights: str = "0", fault: str = "") -> dict[str, Any]:
    """The content of `report.json`.  `weights` is the version of the weights, `fault` why newer ones could not be loaded."""
    workers = [_worker(part) for part in finished.parts]
    whole = {number: row for requests in whole_requests(finished).values() for number, row in requests.items()}
    tokens = sum(len(finished.tokens(number)) for number in finished.responses)
    straggler = max(workers, key=lambda each: each["finished_s"])
    others = [each["finished_s"] for each in workers if each is not straggler]
    kind = FORCED if about["fixed_responses"] else LIVE
    drafts, accepted = sum(each["drafts"] for each in workers), sum(each["accepted"] for each in workers)
    return about | {
        "round": finished.number,
        "requests": len(finished.responses),
        "wall_s": _round(finished.wall_s),
        "tokens": tokens,
        "tokens_per_s": _round(ratio(tokens, finished.wall_s)),
        "acceptance_is": kind,
        f"{kind}_acceptance_length": _round(1 + accepted / drafts) if drafts else None,
        "straggler": {
            "worker": straggler["worker"],
            "finished_s": straggler["finished_s"],
            "behind_the_others_s": _round(straggler["finished_s"] - statistics.median(others)) if others else 0.0,
        },
        "moved": finished.moves,
        "weights": weights,
        "weights_fault": fault,
        "died": [
            {"worker": death.worker, "reason": death.reason, "at_s": _round(death.at_s), "requests_resumed": death.resumed}
            for death in finished.deaths
        ],
        "workers": workers,
        "summary": _summary(list(whole.values()), [row for part in finished.parts for row in part.rows.steps]),
        "worst_drafted": _worst_drafted(whole),
    }


def markdown(report: dict[str, Any]) -> str:
    kind = report["acceptance_is"]
    length = report[f"{kind}_acceptance_length"]
    straggler = report["straggler"]
    label = (
        "Responses were fixed: acceptance is **teacher-forced** (agreement with the trace), no live figure."
        if kind == FORCED
        else "Responses were free: acceptance is live."
    )
    lines = [
        f"# Step {report['step']}, round {report['round']}",
        "",
        f"{report['implementation']}, mode `{report['mode']}`, drafts by {report['method']}, K = {report['k']}; "
        f"model {report['model']}, {report['drafters']} drafter(s). {label}",
        "",
        f"- {report['requests']} requests, {report['tokens']} tokens in {report['wall_s']:.1f} s: "
        f"{report['tokens_per_s']:.0f} tokens/s",
        f"- acceptance length ({kind.replace('_', '-')}): {length:.2f}" if length else "- nothing was drafted",
        f"- weights: {report['weights']}",
        *([f"- **newer weights were not loaded**: {report['weights_fault']}"] if report["weights_fault"] else []),
        f"- straggler: worker {straggler['worker']}, done after {straggler['finished_s']:.1f} s, "
        f"{straggler['behind_the_others_s']:.1f} s behind the others",
    ]
    lines += [
        f"- **worker {death['worker']} {death['reason']}** after {death['at_s']:.1f} s; "
        f"{death['requests_resumed']} requests went on at others"
        for death in report["died"]
    ]
    head = ("worker", "requests", "tokens", "steps", "batch mean/max", "verify s", "busy s", "awaiting drafts s", "done s")
    rows = [
        (
            each["worker"],
            each["requests"],
            each["tokens"],
            each["steps"],
            f"{each['batch_mean']:.1f}/{each['batch_max']}",
            f"{each['verify_s']:.2f}",
            f"{each['busy_s']:.2f}",
            f"{each['idle_s'].get('awaiting_draft', 0.0):.2f}",
            f"{each['finished_s']:.1f}",
        )
        for each in report["workers"]
    ]
    lines += _table(head, rows)
    figures = [
        (name, f"{each['mean']:.2f}", f"{each['min']:.2f}", f"{each['max']:.2f}", f"{each['sum']:.1f}")
        for name, each in report["summary"].items()
    ]
    lines += _table(("", "mean", "least", "most", "sum"), figures)
    if report["worst_drafted"]:
        shares = [
            (each["request"], each["tokens"], each["draft_tokens"], f"{each['accepted'] / each['draft_tokens']:.0%}")
            for each in report["worst_drafted"]
        ]
        lines += ["", "Drafts agreed least with these requests:"]
        lines += _table(("request", "tokens", "draft tokens", "accepted"), shares)
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table, after an empty one."""
    cells = (head, ["---"] * len(head), *rows)
    return ["", *("| " + " | ".join(map(str, row)) + " |" for row in cells)]


def _summary(requests: Sequence[RequestRow], steps: Sequence[StepRow]) -> dict[str, dict[str, float]]:
    """Mean, minimum, maximum and sum of figures per request and per step."""
    values: dict[str, list[float]] = {
        "response tokens": [row.tokens for row in requests],
        "seconds of a request": [row.ended_at - row.arrived_at for row in requests],
        "verifications": [row.verifications for row in requests],
        "tokens per verification": [ratio(row.tokens, row.verifications) for row in requests],
        "requests in a step": [row.requests for row in steps],
        "requests waiting": [row.waiting for row in steps],
        "share of the KV cache in use": [row.kv_usage for row in steps],
        "ms of a verification step": [row.verify_ms for row in steps],
    }
    return {
        name: {
            "mean": _round(statistics.fmean(each)),
            "min": _round(min(each)),
            "max": _round(max(each)),
            "sum": _round(sum(each)),
        }
        for name, each in values.items()
        if each
    }


def _worst_drafted(requests: Mapping[int, RequestRow]) -> list[dict[str, int]]:
    """The `WORST` requests with the lowest share of accepted draft tokens, of those with at least `ENOUGH` draft tokens."""
    drafted = [(row.accepted / row.draft_tokens, number) for number, row in requests.items() if row.draft_tokens >= ENOUGH]
    rows = [(number, requests[number]) for _, number in sorted(drafted)[:WORST]]
    return [
        {"request": number, "tokens": row.tokens, "draft_tokens": row.draft_tokens, "accepted": row.accepted}
        for number, row in rows
    ]


def _worker(part: Part) -> dict[str, Any]:
    steps = part.rows.steps
    verified = [row for row in part.rows.verifications if row.request_id in part.numbers]
    emitting = [step.requests for step in steps if step.requests]
    idle: dict[str, float] = {}
    for step in steps[1:]:
        for cause, milliseconds in step.idle_ms.items():
            idle[cause] = idle.get(cause, 0.0) + milliseconds / 1e3
    drafted = [row for row in verified if row.draft_tokens]
    accepted = sum(row.accepted for row in drafted)
    return {
        "worker": part.number,
        "requests": len(part.completed),
        "tokens": sum(row.tokens for row in verified),
        "steps": len(steps),
        "batch_mean": _round(statistics.fmean(emitting)) if emitting else 0.0,
        "batch_max": max(emitting, default=0),
        "verifications": len(verified),
        "drafts": len(drafted),
        "draft_tokens": sum(row.draft_tokens for row in drafted),
        "accepted": accepted,
        "verify_s": _round(sum(step.verify_ms for step in steps) / 1e3),
        "draft_s": _round(sum(step.draft_ms for step in steps) / 1e3),
        "busy_s": _round(sum(step.busy_ms for step in steps) / 1e3),
        "idle_s": {cause: _round(seconds) for cause, seconds in idle.items()},
        "step_ms_median": _round(statistics.median(step.busy_ms for step in steps)) if steps else 0.0,
        "finished_s": _round(part.finished_s),
    }


def _round(value: float) -> float:
    return round(value, 3)
