"""Puts a round's results where analysis scripts look for them.  The command's process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backend.rollout.outcome import Round
from backend.rollout.report import markdown, merged
from backend.rollout.tables import (
    MARKOV_COLUMNS,
    PERF_COLUMNS,
    REQUEST_COLUMNS,
    csv_text,
    markov_table,
    perf_table,
    request_table,
    whole_requests,
)


def round_directory(out: Path, step: int, number: int) -> Path:
    """`step{S}/round{R}/`; rounds are counted from 0."""
    return out / f"step{step}" / f"round{number}"


def cases_file(out: Path, step: int) -> Path:
    """`cases/train.{S}.parquet`."""
    return out / "cases" / f"train.{step}.parquet"


def write_round(directory: Path, finished: Round, report: dict[str, Any]) -> None:
    """The three tables of every worker, and the report."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("worker_*_*.csv"):
        # An earlier rollout to the same place may have had more workers.
        stale.unlink()
    verified = finished.verifications()
    for part in merged(finished.parts):
        tables = {
            "perf": (PERF_COLUMNS, perf_table(part.rows.steps)),
            "request": (REQUEST_COLUMNS, request_table(whole_requests(part, finished, verified))),
            "markov": (MARKOV_COLUMNS, markov_table(part.rows.verifications, part.numbers)),
        }
        for name, (columns, rows) in tables.items():
            file = directory / f"worker_{part.number}_{name}.csv"
            file.write_text(csv_text(columns, rows), encoding="utf-8")
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (directory / "report.md").write_text(markdown(report), encoding="utf-8")
