"""Reads directories of records back: which incarnations there are, and their rows of one kind within a period.

The command-line process.  Files are read one at a time: records may be larger than memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backend.config.sources import CommandError
from backend.records import schema
from backend.records.schema import ABOUT, SCHEMA_VERSION, SCHEMAS, VERSION_KEY, Books
from backend.records.store import FILE

IDLE_COLUMNS = {cause: f"idle_{cause}_ms" for cause in schema.IDLE_COLUMNS}


class RecordsError(CommandError):
    """The records cannot be read as asked; the message is one line for a person."""


@dataclass(frozen=True)
class Selection:
    """Which rows: of these verifiers (none: of all), since and until a moment in Unix seconds.

    Steps and decisions count by when they began, verifications by their step, requests by when they ended.
    """

    verifiers: frozenset[str] = frozenset()
    since: float | None = None
    until: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether any time is excluded."""
        return self.since is not None or self.until is not None


EVERYTHING = Selection()
TIME_OF = {"step": "began_at", "request": "ended_at", "decision": "at"}


@dataclass(frozen=True)
class Incarnation:
    """One verifier process's records."""

    directory: Path
    books: Books

    @property
    def verifier_id(self) -> str:
        """Which verifier it was."""
        return self.books.about.verifier_id

    def files(self, kind: str) -> list[Path]:
        """In the order they were written."""
        return sorted(file for file in self.directory.glob(f"{kind}-*.parquet") if FILE.fullmatch(file.name))


class Records:
    """All incarnations under a directory.  Raises `RecordsError` where there are none."""

    def __init__(self, directory: Path, selection: Selection = EVERYTHING) -> None:
        self.selection = selection
        self.unreadable: list[Path] = []
        """Files that were skipped."""
        found = _find(directory)
        known = sorted({each.verifier_id for each in found})
        missing = selection.verifiers - set(known)
        if missing:
            raise RecordsError(f"{directory} has no verifier {', '.join(sorted(missing))}; there are {', '.join(known)}")
        self.incarnations = [each for each in found if not selection.verifiers or each.verifier_id in selection.verifiers]

    def tables(self, incarnation: Incarnation, kind: str) -> Iterator[pa.Table]:
        """The selected rows of one kind, a table per file; times idle as columns `idle_<cause>_ms`."""
        steps = self._steps(incarnation) if kind == "verification" and self.selection.is_timed else None
        for table in self._files(incarnation, kind):
            if steps is not None:
                table = table.filter(pc.is_in(table["step"], value_set=steps))
            elif kind in TIME_OF:
                table = self._timed(table, TIME_OF[kind])
            if table.num_rows:
                yield _flat(table)

    def table(self, incarnation: Incarnation, kind: str) -> pa.Table:
        """All of them at once."""
        tables = list(self.tables(incarnation, kind))
        return pa.concat_tables(tables) if tables else _flat(SCHEMAS[kind].empty_table())

    def without_work_s(self, incarnation: Incarnation) -> float:
        """Seconds of the selected period in which there was no work, as far as a later step tells of them.

        A step's row accounts for all the time since the step before: where a period begins or ends between two steps, the row
        says more, or belongs to the step behind its end.
        """
        total = 0.0
        for steps in map(_flat, self._files(incarnation, "step")):
            ended = pc.subtract(steps["began_at"], pc.divide(waited_ms(steps), 1e3))
            began = pc.subtract(ended, pc.divide(steps[IDLE_COLUMNS["no_work"]], 1e3))
            if self.selection.since is not None:
                began = pc.max_element_wise(began, self.selection.since)
            if self.selection.until is not None:
                ended = pc.min_element_wise(ended, self.selection.until)
            total += pc.sum(pc.max_element_wise(pc.subtract(ended, began), 0.0)).as_py() or 0.0
        return total

    def _files(self, incarnation: Incarnation, kind: str) -> Iterator[pa.Table]:
        for file in incarnation.files(kind):
            try:
                table = pq.read_table(file)
            except (OSError, pa.ArrowException):
                # A running verifier may delete its oldest file between the listing and now.
                if file.exists():
                    self.unreadable.append(file)
                continue
            version = (table.schema.metadata or {}).get(VERSION_KEY)
            if version != str(SCHEMA_VERSION).encode() or table.schema.names != SCHEMAS[kind].names:
                raise RecordsError(f"{file} is not of version {SCHEMA_VERSION} of the records")
            yield table.replace_schema_metadata(None)

    def _steps(self, incarnation: Incarnation) -> pa.Array:
        columns = [self._timed(table, "began_at")["step"] for table in self._files(incarnation, "step")]
        return pa.chunked_array(columns, pa.int64()).combine_chunks()

    def _timed(self, table: pa.Table, column: str) -> pa.Table:
        if self.selection.since is not None:
            table = table.filter(pc.greater_equal(table[column], self.selection.since))
        if self.selection.until is not None:
            table = table.filter(pc.less(table[column], self.selection.until))
        return table


def waited_ms(steps: pa.Table) -> Any:
    """Idle time of each step while there was work.  It comes last, right before the step."""
    waited = pc.multiply(steps["busy_ms"], 0.0)
    for cause, column in IDLE_COLUMNS.items():
        if cause != "no_work":
            waited = pc.add(waited, steps[column])
    return waited


def has_records(directory: Path) -> bool:
    """Whether there is anything to read under `directory`."""
    return any(_candidates(directory))


def _candidates(directory: Path) -> Iterator[Path]:
    """`DIR/<verifier>/<incarnation>`, or any directory nearer to it."""
    for pattern in (ABOUT, f"*/{ABOUT}", f"*/*/{ABOUT}"):
        yield from directory.glob(pattern)


def _find(directory: Path) -> list[Incarnation]:
    if not directory.is_dir():
        raise RecordsError(f"{directory}: no such directory")
    found = [Incarnation(file.parent, _books(file)) for file in _candidates(directory)]
    if not found:
        empty = not any(directory.iterdir())
        raise RecordsError(
            f"{directory} {'is empty' if empty else 'holds no records'}: verifiers write there with --records-dir"
        )
    return sorted(found, key=lambda each: (each.verifier_id, each.books.about.started_at, each.books.about.incarnation))


def _books(file: Path) -> Books:
    try:
        text = file.read_bytes()
        version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        if version != SCHEMA_VERSION:
            raise RecordsError(f"{file.parent}: records of version {version}; this release reads version {SCHEMA_VERSION}")
        return msgspec.json.decode(text, type=Books)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordsError(f"{file} is not what a verifier writes: {' '.join(str(error).split())}") from error


def _flat(table: pa.Table) -> pa.Table:
    """One column per cause in place of a structure: joins and CSV take no structures."""
    table = table.flatten()
    return table.rename_columns([re.sub(r"^idle_ms\.(.+)", r"idle_\1_ms", name) for name in table.column_names])
