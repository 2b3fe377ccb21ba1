"""Writes records as files for other programs: the rows of one kind, or verifications joined with their steps and requests.

The command-line process.  A join is made per incarnation, because step numbers and request ids are unique only within one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from backend.records.reading import Incarnation, Records

Format = Literal["csv", "jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("csv", "jsonl", "parquet")


def rows(records: Records, kind: str) -> Iterator[pa.Table]:
    """Every selected row of one kind, with columns for its verifier and incarnation."""
    for incarnation in records.incarnations:
        for table in records.tables(incarnation, kind):
            yield _owned(table, incarnation)


def joined(records: Records) -> Iterator[pa.Table]:
    """Verifications with the columns of their step (`step_*`) and of their request (`request_*`), a table per incarnation.

    Columns of an unrecorded step or request (dropped, or still running) are null.  If several requests have one id, the one
    that ended last is taken.
    """
    for incarnation in records.incarnations:
        verifications = records.table(incarnation, "verification")
        if not verifications.num_rows:
            continue
        steps = _prefixed(records.table(incarnation, "step"), "step", keep="step")
        requests = _prefixed(_last_of_each(records.table(incarnation, "request")), "request", keep="request_id")
        table = verifications.join(steps, "step", join_type="left outer").join(requests, "request_id", join_type="left outer")
        yield _owned(table.sort_by([("step", "ascending"), ("request_id", "ascending")]), incarnation)


def _owned(table: pa.Table, incarnation: Incarnation) -> pa.Table:
    about = incarnation.books.about
    for name, value in (("incarnation", about.incarnation), ("verifier", about.verifier_id)):
        table = table.add_column(0, name, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
    return table


def _prefixed(table: pa.Table, prefix: str, keep: str) -> pa.Table:
    return table.rename_columns(
        [name if name == keep or name.startswith(f"{prefix}_") else f"{prefix}_{name}" for name in table.schema.names]
    )


def _last_of_each(requests: pa.Table) -> pa.Table:
    ordered = requests.sort_by("ended_at")
    placed = ordered.append_column("place", pa.array(range(len(ordered)), pa.int64()))
    return ordered.take(placed.group_by("request_id").aggregate([("place", "max")])["place_max"])


class _Lines:
    """Writes JSON lines, one object per row; has the methods of Arrow's writers."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write_table(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=10_000):
            self._file.writelines(json.dumps(row).encode() + b"\n" for row in batch.to_pylist())

    def close(self) -> None:
        """Does nothing: the caller closes the file."""


def write(tables: Iterator[pa.Table], file: IO[bytes], kind: Format) -> int:
    """Writes tables of one schema; returns the number of rows.  Without tables nothing is written."""
    count = 0
    sink: Any = None
    for table in tables:
        if sink is None:
            sink = _sink(table.schema, file, kind)
        sink.write_table(table)
        count += table.num_rows
    if sink is not None:
        sink.close()
    return count


def _sink(schema: pa.Schema, file: IO[bytes], kind: Format) -> Any:
    if kind == "csv":
        return pyarrow.csv.CSVWriter(file, schema)
    if kind == "parquet":
        return pq.ParquetWriter(file, schema, compression="zstd")
    return _Lines(file)


def write_file(tables: Iterator[pa.Table], path: Path, kind: Format) -> int:
    """Writes tables to `path` and returns the number of rows.

    The file appears when it is complete; without rows there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            count = write(tables, file, kind)
        if count:
            os.replace(part, path)
        return count
    finally:
        part.unlink(missing_ok=True)
