"""Gives records to other programs: the rows of one kind, or verifications joined with their steps and requests.

The command-line process.  A join is made per incarnation, because step numbers and request ids are unique only within one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from backend.records.reading import Incarnation, Records
from backend.records.store import appearing

Format = Literal["csv", "parquet"]


def rows(records: Records, kind: str) -> pa.Table:
    """Every selected row of one kind, with columns for its verifier and incarnation."""
    return pa.concat_tables(_owned(records.table(each, kind), each) for each in records.incarnations)


def join_verifications(records: Records) -> pa.Table:
    """Verifications with the columns of their step (`step_*`) and of their request (`request_*`).

    Columns of an unrecorded step or request (dropped, or still running) are null.  If several requests have one id, the one
    that ended last is taken.
    """
    return pa.concat_tables(_owned(_join(records, each), each) for each in records.incarnations)


def _join(records: Records, incarnation: Incarnation) -> pa.Table:
    steps = _prefixed(records.table(incarnation, "step"), "step", keep="step")
    requests = _prefixed(_last_of_each(records.table(incarnation, "request")), "request", keep="request_id")
    table = records.table(incarnation, "verification").join(steps, "step", join_type="left outer")
    return table.join(requests, "request_id", join_type="left outer").sort_by(
        [("step", "ascending"), ("request_id", "ascending")]
    )


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
    ordered: Sequence[str] = requests.sort_by("ended_at")["request_id"].to_pylist()
    places = {request_id: place for place, request_id in enumerate(ordered)}
    return requests.sort_by("ended_at").take(pa.array(places.values(), pa.int64()))


def write(table: pa.Table, target: Path | IO[bytes], kind: Format) -> None:
    """Writes a table; a file appears when it is complete."""
    if not isinstance(target, Path):
        pyarrow.csv.write_csv(table, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with appearing(target) as part:
        if kind == "csv":
            pyarrow.csv.write_csv(table, part)
        else:
            pq.write_table(table, part, compression="zstd")
