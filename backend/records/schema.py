"""Arrow schemas of the rows, and the metadata of files and directories of records.  Pure data, in any process.

Schemas follow from the fields of the row types.  `SCHEMA_VERSION` grows with every change of a field's name or meaning.  Each
file's metadata holds the version and the verifier; each incarnation's directory has an `about.json`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from backend.records.rows import DecisionRow, RequestRow, Row, StepRow, VerificationRow

SCHEMA_VERSION = 4
ABOUT = "about.json"
VERSION_KEY = b"outrider.records"
ABOUT_KEY = b"outrider.about"

KINDS: dict[str, type[Row]] = {"step": StepRow, "verification": VerificationRow, "request": RequestRow, "decision": DecisionRow}
KIND_OF: dict[type[Any], str] = {row: kind for kind, row in KINDS.items()}
IDLE_COLUMNS = ("no_work", "awaiting_draft", "transfer", "swap")
"""The causes of idle time, and `transfer`: it is always 0, and stays for programs that read this column."""
_IDLE = pa.struct([(cause, pa.float64()) for cause in IDLE_COLUMNS])
_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
    dict[str, float]: _IDLE,
}


class About(msgspec.Struct, frozen=True):
    """One verifier incarnation."""

    verifier_id: str
    incarnation: str
    started_at: float
    mode: str
    model: str
    num_speculative_tokens: int


class Books(msgspec.Struct):
    """Content of `about.json`: the verifier, and how many rows were written and dropped so far, by kind."""

    version: int
    about: About
    written: dict[str, int]
    dropped: dict[str, int]
    removed: dict[str, int]
    """Rows whose files were deleted to stay within `records.max_mib`."""
    ended: bool
    """Whether the verifier stopped in good order: then no rows are missing but those counted here."""


SCHEMAS: dict[str, pa.Schema] = {
    kind: pa.schema([(field.name, _TYPES[field.type]) for field in msgspec.structs.fields(row)]) for kind, row in KINDS.items()
}


def to_table(kind: str, rows: Sequence[Row]) -> pa.Table:
    schema = SCHEMAS[kind]
    columns = list(zip(*map(msgspec.structs.astuple, rows), strict=True)) or [() for _ in schema]
    return pa.Table.from_arrays(
        [_column(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == _IDLE:
        values = [{cause: idle.get(cause, 0.0) for cause in IDLE_COLUMNS} for idle in values]
    return pa.array(values, kind)


def metadata(about: About) -> dict[bytes, bytes]:
    return {VERSION_KEY: str(SCHEMA_VERSION).encode(), ABOUT_KEY: msgspec.json.encode(about)}
