"""Writes a run's reports: `requests.csv`, `summary.json` and `summary.md`, beside Locust's `report.html`."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtest.figures import Figures, by_label, reasons, summarize
from loadtest.slo import DISTRIBUTIONS, PERCENTILES, Miss, figure, is_floor
from loadtest.timing import Answer


@dataclass
class Result:
    """The result of one scenario.  Its fields are those of `summary.json`."""

    scenario: str
    command: str
    figures: Figures
    by_label: dict[str, Figures]
    failures: dict[str, int]
    """Number of failures by reason."""
    load_generator: Mapping[str, float]
    """How well the load generator kept up."""
    notes: list[str] = field(default_factory=list)
    slo: Mapping[str, float] = field(default_factory=dict)
    missed: Sequence[Miss] = ()


def evaluate(scenario: str, command: str, answers: Sequence[Answer], server: Figures, health: Mapping[str, float]) -> Result:
    """The result of a run, from the clients' answers and the server's own figures."""
    return Result(scenario, command, {**summarize(answers), **server}, by_label(answers), reasons(answers), health)


def write(result: Result, answers: Sequence[Answer], directory: Path) -> None:
    write_requests(directory / "requests.csv", answers)
    document = asdict(result) | {"passed": not result.missed, "missed": [str(miss) for miss in result.missed]}
    (directory / "summary.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (directory / "summary.md").write_text(text(result) + "\n", encoding="utf-8")


def write_requests(file: Path, answers: Sequence[Answer]) -> None:
    """Writes one row per request.  Times are in ms; `start_ms` counts from the first request's start."""
    columns = ["label", "user", "number", "outcome", "reason", "status", "start_ms", "ttft_ms", "e2e_ms", "tpot_ms", "tgs"]
    columns += ["tgs_e2e", "chunks", "prompt_tokens", "tokens", "finish_reason"]
    zero = min((answer.started for answer in answers), default=0.0)
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(columns)
        for answer in sorted(answers, key=lambda each: each.started):
            times = (answer.started - zero, answer.ttft_s, answer.ended - answer.started, answer.tpot_s)
            rows.writerow(
                [answer.label, answer.user, answer.number, answer.outcome, answer.reason, answer.status]
                + ["" if seconds is None else f"{seconds * 1000:.3f}" for seconds in times]
                + ["" if rate is None else f"{rate:.3f}" for rate in (answer.tgs, answer.tgs_e2e)]
                + [len(answer.chunks), answer.prompt_tokens, answer.tokens, answer.finish_reason]
            )


def text(result: Result) -> str:
    """The summary as Markdown, also shown on the terminal."""
    figures = result.figures
    lines = [f"## {result.scenario}: {'passed' if not result.missed else 'MISSED'}", "", f"`{result.command}`", ""]
    for names in (
        ("requests", "failures", "aborted", "rejected", "leftover", "tokens", "requests_per_s", "tokens_per_s"),
        ("acceptance_length", "busy_share", "awaiting_draft_share", "tgs_drift", "preemptions"),
        ("pairs", "speedup_p50", "speedup_e2e_p50", "identical"),
    ):
        lines.append(", ".join(f"{name} {_show(figures[name])}" for name in names if figures.get(name) is not None))
    lines += ["", *_table(result), ""]
    lines += [f"failure: {reason} ({count}x)" for reason, count in result.failures.items()]
    lines += result.notes
    lines.append("load generator: " + ", ".join(f"{name} {_show(value)}" for name, value in result.load_generator.items()))
    limits = [f"{name} {'>=' if is_floor(name) else '<='} {limit:g}" for name, limit in result.slo.items()]
    lines.append("objectives: " + (", ".join(limits) or "none"))
    lines += [f"missed: {miss}" for miss in result.missed]
    return "\n".join(line for number, line in enumerate(lines) if line or (number and lines[number - 1]))


def _table(result: Result) -> list[str]:
    """Percentiles of every figure, for all requests and, if there are several kinds, for each kind."""
    rows = {"all": result.figures} | (result.by_label if len(result.by_label) > 1 else {})
    lines = [
        "| requests | figure | " + " | ".join(f"p{p}" for p in PERCENTILES) + " |",
        "|---|---|" + "---|" * len(PERCENTILES),
    ]
    for label, figures in rows.items():
        for name, unit in DISTRIBUTIONS.items():
            values = [figures.get(figure(name, p)) for p in PERCENTILES]
            if any(value is not None for value in values) and (label == "all" or name in ("ttft", "tgs", "e2e")):
                shown = " | ".join(_show(value) for value in values)
                lines.append(f"| {label} | {name}{' ' + unit if unit else ' tok/s'} | {shown} |")
    return lines


def _show(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
