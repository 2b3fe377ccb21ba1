"""Writes and rotates one verifier incarnation's parquet files, and keeps them within a size.  The writer's thread.

    DIR/<verifier>/<start>-<incarnation>/about.json, step-000001.parquet, verification-000001.parquet, ...

A file is written under a name that readers skip, and renamed when it is complete.  Rows that cannot be written are dropped and
counted; disk errors raise nothing.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from backend.config import RecordsSettings
from backend.records.rows import Row
from backend.records.schema import ABOUT, KINDS, SCHEMA_VERSION, About, Books, metadata, to_table

logger = logging.getLogger(__name__)

FILE = re.compile(rf"\.?({'|'.join(KINDS)})-\d{{6,}}\.parquet(\.part)?")
"""Names of files that we write, incomplete ones included; no other file is ever deleted."""


ROTATE_ROWS, ROTATE_BYTES, ROTATE_S = 200_000, 16 * 2**20, 30.0
"""A file is written when so many rows wait for it, or so many bytes before compression."""


@contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """Yields a path to write to.  The file becomes `final` when the block ends without an error; else it is removed."""
    part = final.with_name(f".{final.name}.part")
    try:
        yield part
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)


class _Pending:
    """Rows of one kind that are not in a file yet."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.tables: list[pa.Table] = []
        self.rows = 0
        self.size = 0


class RecordStore:
    """One incarnation's files.  `overflow` counts, by kind, rows dropped before `add`; `now` is always monotonic seconds."""

    def __init__(self, about: About, settings: RecordsSettings, overflow: dict[str, int]) -> None:
        if settings.dir is None:
            raise ValueError("records.dir is not set")
        start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(about.started_at))
        self._verifier = Path(settings.dir) / re.sub(r"[^\w.-]", "_", about.verifier_id)
        self.directory = self._verifier / f"{start}-{about.incarnation[:8]}"
        self.written = dict.fromkeys(KINDS, 0)
        self._lost = dict.fromkeys(KINDS, 0)
        self._overflow = overflow
        self._removed = dict.fromkeys(KINDS, 0)
        self._about = about
        self._settings = settings
        self._pending: dict[str, _Pending] = {}
        self._files = 0
        self._refused = ""

    def dropped(self) -> dict[str, int]:
        """Number of rows that are in no file and never will be, by kind."""
        return {kind: n + self._overflow[kind] for kind, n in self._lost.items()}

    def drop(self, kind: str, rows: int) -> None:
        """Counts rows that cannot be kept."""
        self._lost[kind] += rows

    def add(self, kind: str, rows: Sequence[Row], now: float) -> None:
        """Takes rows; they reach the disk at the next rotation."""
        table = to_table(kind, rows)
        pending = self._pending.setdefault(kind, _Pending(now))
        pending.tables.append(table)
        pending.rows += table.num_rows
        pending.size += table.nbytes

    def rotate(self, now: float) -> None:
        """Writes the files that are due by age, rows or size."""
        due = [
            kind
            for kind, pending in self._pending.items()
            if now - pending.since >= ROTATE_S or pending.rows >= ROTATE_ROWS or pending.size >= ROTATE_BYTES
        ]
        if due:
            self._write(due, ended=False)

    def close(self) -> None:
        """Writes all pending rows."""
        self._write(list(self._pending), ended=True)

    def _write(self, kinds: list[str], *, ended: bool) -> None:
        for kind in kinds:
            pending = self._pending.pop(kind)
            try:
                self._write_file(kind, pa.concat_tables(pending.tables))
            except (OSError, pa.ArrowException) as error:
                self.drop(kind, pending.rows)
                self._note_refusal(str(error))
            else:
                self.written[kind] += pending.rows
                self._note_success()
        try:
            self._remove_oldest()
            self._write_about(ended)
        except (OSError, pa.ArrowException) as error:
            self._note_refusal(str(error))

    def _write_file(self, kind: str, table: pa.Table) -> None:
        self._files += 1
        final = self.directory / f"{kind}-{self._files:06d}.parquet"
        self.directory.mkdir(parents=True, exist_ok=True)
        with appearing(final) as part:
            pq.write_table(table.replace_schema_metadata(metadata(self._about)), part, compression="zstd")

    def _write_about(self, ended: bool) -> None:
        if not self.directory.is_dir():
            return
        books = Books(SCHEMA_VERSION, self._about, self.written, self.dropped(), self._removed, ended)
        _write_books(self.directory, books)

    def _remove_oldest(self) -> None:
        """Deletes this verifier's oldest files, former incarnations included, until all fit in `records.max_mib`."""
        files = [(each, each.stat().st_size) for each in self._verifier.glob("*/*") if FILE.fullmatch(each.name)]
        files.sort(key=lambda file: (file[0].parent.name, file[0].name.partition("-")[2]))
        over = sum(size for _, size in files) - self._settings.max_mib * 2**20
        for file, size in files:
            if over <= 0:
                break
            over -= size
            self._remove(file)

    def _remove(self, file: Path) -> None:
        if file.parent == self.directory and file.suffix == ".parquet":
            self._removed[file.name.partition("-")[0]] += pq.read_metadata(file).num_rows
        elif file.suffix == ".parquet":
            # What an earlier process left may be damaged, and goes all the same.
            with suppress(OSError, pa.ArrowException, msgspec.MsgspecError):
                books = msgspec.json.decode((file.parent / ABOUT).read_bytes(), type=Books)
                books.removed[file.name.partition("-")[0]] += pq.read_metadata(file).num_rows
                _write_books(file.parent, books)
        file.unlink()
        left = [each.name for each in file.parent.iterdir()]
        if file.parent != self.directory and set(left) <= {ABOUT}:
            (file.parent / ABOUT).unlink(missing_ok=True)
            file.parent.rmdir()

    def _note_refusal(self, reason: str) -> None:
        if reason != self._refused:
            logger.warning("records are dropped, %s cannot be written: %s", self.directory, reason)
        self._refused = reason

    def _note_success(self) -> None:
        if self._refused:
            logger.info("records are written again")
        self._refused = ""


def _write_books(directory: Path, books: Books) -> None:
    with appearing(directory / ABOUT) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(books)))
