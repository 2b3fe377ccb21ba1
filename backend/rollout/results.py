"""Writes a round's results: tables as CSV, rows as records, responses, and the report.  The command's process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.config import RecordsSettings, Settings
from backend.records.schema import About
from backend.records.store import RecordStore
from backend.rollout import tables
from backend.rollout.outcome import RoundResult, WorkerShare

if TYPE_CHECKING:
    from backend.engine.front import RequestOutput

RESPONSES = "responses.jsonl"
RECORDS = "records"


def write_round(directory: Path, finished: RoundResult, report: dict[str, Any], text: str, settings: Settings) -> None:
    """Replaces the results in `directory`; `report` and `text` are the report as JSON and Markdown.  Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("worker_*_*.csv"), *directory.glob(RESPONSES)):
        # An earlier rollout to the same place may have had more workers, or free responses.
        stale.unlink()
    shutil.rmtree(directory / RECORDS, ignore_errors=True)
    if not report["fixed_responses"]:
        _write_responses(directory / RESPONSES, finished.responses)
    for part in finished.parts:
        for name, table in tables.of_worker(part).items():
            (directory / f"worker_{part.number}_{name}.csv").write_text(table, encoding="utf-8")
        _write_records(directory / RECORDS, part, settings)
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (directory / "report.md").write_text(text, encoding="utf-8")


def _write_records(directory: Path, part: WorkerShare, settings: Settings) -> None:
    started_at = part.rows.steps[0].began_at if part.rows.steps else 0.0
    about = About(
        f"verifier-{part.number}", "rollout", started_at, settings.mode, settings.model, settings.num_speculative_tokens
    )
    store = RecordStore(about, RecordsSettings(dir=str(directory)))
    store.add([*part.rows.steps, *part.rows.verifications, *part.requests], 0.0)
    store.close()


def _write_responses(file: Path, responses: Mapping[int, RequestOutput]) -> None:
    """Writes free responses as JSON Lines, by request number."""
    from backend.engine.front.offline import response_row

    with file.open("w", encoding="utf-8") as lines:
        for number in sorted(responses):
            lines.write(json.dumps({"req_id": number, **response_row(responses[number])}) + "\n")
