"""Reads directories of records: finds verifier incarnations, and gives their rows of one kind within a period.

The command-line process.  Files are read one at a time, because records may be larger than memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backend.config.sources import CommandError
from backend.records import schema
from backend.records.schema import ABOUT, SCHEMA_VERSION, SCHEMAS, VERSION_KEY, Books
from backend.records.store import FILE

Numbers = npt.NDArray[np.float64]
IDLE_COLUMNS = {cause: f"idle_{cause}_ms" for cause in schema.IDLE_COLUMNS}


class RecordsError(CommandError):
    """Records cannot be read, or not as requested; the message is one line."""


@dataclass(frozen=True)
class Selection:
    """Selects rows by verifier (empty: all verifiers) and by time, from `since` to before `until`, in Unix seconds.

    A step or decision is selected by its beginning, a verification by its step, a request by its end.
    """

    verifiers: frozenset[str] = frozenset()
    since: float | None = None
    until: float | None = None

    @property
    def is_timed(self) -> bool:
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
        return self.books.about.verifier_id

    def files(self, kind: str) -> list[Path]:
        """Files of one kind, in the order they were written."""
        return sorted(file for file in self.directory.glob(f"{kind}-*.parquet") if FILE.fullmatch(file.name))


class Records:
    """All incarnations under a directory.  Raises `RecordsError` when there are none, or not the selected verifiers."""

    def __init__(self, directory: Path, selection: Selection = EVERYTHING) -> None:
        self.selection = selection
        self.unreadable: list[Path] = []
        """Files that were skipped because they cannot be read."""
        found = _find(directory)
        known = sorted({each.verifier_id for each in found})
        missing = selection.verifiers - set(known)
        if missing:
            raise RecordsError(f"{directory} has no verifier {', '.join(sorted(missing))}; there are {', '.join(known)}")
        self.incarnations = [each for each in found if not selection.verifiers or each.verifier_id in selection.verifiers]

    def tables(self, incarnation: Incarnation, kind: str) -> Iterator[pa.Table]:
        """The selected rows of one kind, one table per file; idle times are columns `idle_<cause>_ms`."""
        steps = self._steps(incarnation) if kind == "verification" and self.selection.is_timed else None
        for table in self._files(incarnation, kind):
            if steps is not None:
                table = table.filter(pc.is_in(table["step"], value_set=steps))
            elif kind in TIME_OF:
                table = self._timed(table, TIME_OF[kind])
            if table.num_rows:
                yield _flat(table)

    def table(self, incarnation: Incarnation, kind: str) -> pa.Table:
        """The selected rows of one kind in a single table."""
        tables = list(self.tables(incarnation, kind))
        return pa.concat_tables(tables) if tables else _flat(SCHEMAS[kind].empty_table())

    def without_work_s(self, incarnation: Incarnation) -> float:
        """Seconds of the selected period without work, as far as a later step has recorded them.

        A step's row accounts for all the time since the previous step.  So idle time at the borders of the period is cut to
        it, and the step after its end is read too.
        """
        total = 0.0
        for steps in map(_flat, self._files(incarnation, "step")):
            ended = steps["began_at"].to_numpy() - waited_ms(steps) / 1e3
            began = ended - steps[IDLE_COLUMNS["no_work"]].to_numpy() / 1e3
            if self.selection.since is not None:
                began = np.maximum(began, self.selection.since)
            if self.selection.until is not None:
                ended = np.minimum(ended, self.selection.until)
            total += float(np.maximum(ended - began, 0.0).sum())
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


def waited_ms(steps: pa.Table) -> Numbers:
    """Idle milliseconds before each step while there was work.  They directly precede the step, after any time without work."""
    waited: Numbers = np.zeros(len(steps))
    for cause, column in IDLE_COLUMNS.items():
        if cause != "no_work":
            waited += steps[column].to_numpy()
    return waited


def has_records(directory: Path) -> bool:
    return any(_candidates(directory))


def _candidates(directory: Path) -> Iterator[Path]:
    """The `about.json` files; `directory` may hold verifiers, incarnations, or be an incarnation itself."""
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
    """Replaces the struct of idle times by one column per cause: Arrow's joins and CSV do not support structs."""
    table = table.flatten()
    return table.rename_columns([re.sub(r"^idle_ms\.(.+)", r"idle_\1_ms", name) for name in table.column_names])
