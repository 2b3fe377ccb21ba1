"""Reads directories of records: finds verifier incarnations, and gives their rows of one kind within a period.

The command-line process.  All rows that are read are held in memory.
"""

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
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
from backend.records.kept import RowBatch
from backend.records.rows import RequestRow
from backend.records.schema import ABOUT, SCHEMA_VERSION, SCHEMAS, VERSION_KEY, Books, to_table
from backend.records.store import FILE

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.float64]
IDLE_COLUMNS = {cause: f"idle_{cause}_ms" for cause in schema.IDLE_COLUMNS}
TIME_OF = {"step": "began_at", "request": "ended_at", "decision": "at"}


@dataclass(frozen=True)
class VerifierTables:
    """One verifier's rows as tables; the idle times of steps are columns `idle_<cause>_ms`."""

    name: int | str
    steps: pa.Table
    verifications: pa.Table
    requests: pa.Table
    without_work_s: float
    """Seconds without work, at the borders of a selected period only those within it."""


def worker_of(name: int | str, rows: RowBatch, requests: Sequence[RequestRow]) -> VerifierTables:
    """The tables of rows that are in no file."""
    steps = _flat(to_table("step", rows.steps))
    without_work_s = float(steps[IDLE_COLUMNS["no_work"]].to_numpy().sum() / 1e3)
    return VerifierTables(
        name, steps, to_table("verification", rows.verifications), to_table("request", requests), without_work_s
    )


@dataclass(frozen=True)
class Incarnation:
    """One verifier process's records."""

    directory: Path
    books: Books

    @property
    def verifier_id(self) -> str:
        return self.books.about.verifier_id


class Records:
    """Rows under a directory, of some verifiers (by default of all) and from `since` to before `until`, in Unix seconds.

    A step or decision is selected by its beginning, a verification by its step, a request by its end.
    """

    def __init__(self, directory: Path, verifiers: Collection[str] = (), since: float = -np.inf, until: float = np.inf) -> None:
        """Raises `CommandError` when there are no records, or none of one of the verifiers."""
        self._since, self._until = since, until
        self._read = cache(_read)
        found = _find(directory)
        known = sorted({each.verifier_id for each in found})
        missing = set(verifiers) - set(known)
        if missing:
            raise CommandError(f"{directory} has no verifier {', '.join(sorted(missing))}; there are {', '.join(known)}")
        self.incarnations = [each for each in found if not verifiers or each.verifier_id in verifiers]

    def table(self, incarnation: Incarnation, kind: str) -> pa.Table:
        """The selected rows of one kind."""
        table = self._read(incarnation.directory, kind)
        if self._since == -np.inf and self._until == np.inf:
            return table
        if kind == "verification":
            steps = self.table(incarnation, "step")["step"].combine_chunks()
            return table.filter(pc.is_in(table["step"], value_set=steps))
        at = table[TIME_OF[kind]]
        return table.filter(pc.and_(pc.greater_equal(at, self._since), pc.less(at, self._until)))

    def workers(self) -> list[VerifierTables]:
        """The selected rows by incarnation.  Raises `CommandError` if there are no steps among them."""
        gathered = [(each, self.table(each, "step")) for each in self.incarnations]
        gathered = [(each, steps) for each, steps in gathered if steps.num_rows]
        if not gathered:
            raise CommandError("nothing was recorded in this period")
        restarted = len({each.verifier_id for each, _ in gathered}) < len(gathered)
        return [
            VerifierTables(
                f"{each.verifier_id} ({each.books.about.incarnation[:4]})" if restarted else each.verifier_id,
                steps,
                self.table(each, "verification"),
                self.table(each, "request"),
                self._without_work_s(each),
            )
            for each, steps in gathered
        ]

    def _without_work_s(self, incarnation: Incarnation) -> float:
        """A step's row accounts for all the time since the previous step.

        So idle time at the borders of the period is cut to it, and the step after its end is read too.
        """
        steps = self._read(incarnation.directory, "step")
        ended = steps["began_at"].to_numpy() - waited_ms(steps) / 1e3
        began = np.maximum(ended - steps[IDLE_COLUMNS["no_work"]].to_numpy() / 1e3, self._since)
        return float(np.maximum(np.minimum(ended, self._until) - began, 0.0).sum())


def waited_ms(steps: pa.Table) -> Numbers:
    """Idle milliseconds before each step while there was work.  They directly precede the step, after any time without work."""
    waited: Numbers = np.zeros(len(steps))
    for cause, column in IDLE_COLUMNS.items():
        if cause != "no_work":
            waited += steps[column].to_numpy()
    return waited


def _read(directory: Path, kind: str) -> pa.Table:
    tables = [SCHEMAS[kind].empty_table()]
    for file in sorted(each for each in directory.glob(f"{kind}-*.parquet") if FILE.fullmatch(each.name)):
        try:
            table = pq.read_table(file)
        except FileNotFoundError:
            continue  # A running verifier deletes its oldest files.
        except (OSError, pa.ArrowException):
            logger.warning("%s cannot be read and was skipped", file)
            continue
        version = (table.schema.metadata or {}).get(VERSION_KEY)
        if version != str(SCHEMA_VERSION).encode() or table.schema.names != SCHEMAS[kind].names:
            raise CommandError(f"{file} is not of version {SCHEMA_VERSION} of the records")
        tables.append(table.replace_schema_metadata(None))
    return _flat(pa.concat_tables(tables))


def _find(directory: Path) -> list[Incarnation]:
    if not directory.is_dir():
        raise CommandError(f"{directory}: no such directory")
    found = [Incarnation(file.parent, _books(file)) for file in _about_files(directory)]
    if not found:
        raise CommandError(f"{directory} holds no records: verifiers write them with --records-dir, rollouts in round{{R}}/")
    return sorted(found, key=lambda each: (each.verifier_id, each.books.about.started_at, each.books.about.incarnation))


def _about_files(directory: Path) -> Iterator[Path]:
    """`directory` may be a rollout's round, or hold verifiers or incarnations, or be an incarnation itself."""
    for levels in range(4):
        yield from directory.glob("*/" * levels + ABOUT)


def _books(file: Path) -> Books:
    try:
        text = file.read_bytes()
        version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        if version != SCHEMA_VERSION:
            raise CommandError(f"{file.parent}: records of version {version}; this release reads version {SCHEMA_VERSION}")
        return msgspec.json.decode(text, type=Books)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} is not what a verifier writes: {' '.join(str(error).split())}") from error


def _flat(table: pa.Table) -> pa.Table:
    """Replaces the struct of idle times by one column per cause: Arrow's joins and CSV do not support structs."""
    table = table.flatten()
    return table.rename_columns([re.sub(r"^idle_ms\.(.+)", r"idle_\1_ms", name) for name in table.column_names])
