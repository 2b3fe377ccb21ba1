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
from backend.records.schema import ABOUT, KIND_OF, KINDS, SCHEMA_VERSION, About, Books, metadata, to_table

logger = logging.getLogger(__name__)

FILE = re.compile(rf"\.?({'|'.join(KINDS)})-\d{{6,}}\.parquet(\.part)?")
"""Names of files that we write, incomplete ones included; no other file is ever deleted."""

ROTATE_BYTES, ROTATE_S = 16 * 2**20, 30.0
"""Files are written when so many bytes wait, before compression, or when rows have waited for so long."""


@contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """Yields a path to write to.  The file becomes `final` when the block ends without an error; else it is removed."""
    part = final.with_name(f".{final.name}.part")
    try:
        yield part
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)


class RecordStore:
    """One incarnation's files.  `now` is always monotonic seconds."""

    def __init__(self, about: About, settings: RecordsSettings) -> None:
        if settings.dir is None:
            raise ValueError("records.dir is not set")
        start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(about.started_at))
        self._verifier = Path(settings.dir) / re.sub(r"[^\w.-]", "_", about.verifier_id)
        self.directory = self._verifier / f"{start}-{about.incarnation[:8]}"
        self.written = dict.fromkeys(KINDS, 0)
        self._lost = dict.fromkeys(KINDS, 0)
        self.overflow = dict.fromkeys(KINDS, 0)
        """Rows dropped before `add`, by kind.  Only the thread that drops them writes here."""
        self._books = Books(SCHEMA_VERSION, about, self.written, {}, dict.fromkeys(KINDS, 0), ended=False)
        self._settings = settings
        self._pending: dict[str, list[pa.Table]] = {}
        """Rows that are in no file yet, by kind; the first ones came at `_since`."""
        self._since = 0.0
        self._files = 0
        self._refused = ""

    def dropped(self) -> dict[str, int]:
        """Number of rows that are in no file and never will be, by kind."""
        return {kind: n + self.overflow[kind] for kind, n in self._lost.items()}

    def add(self, rows: Sequence[Row], now: float) -> None:
        """Takes rows; they reach the disk at the next rotation."""
        if not self._pending:
            self._since = now
        by_kind: dict[str, list[Row]] = {}
        for row in rows:
            by_kind.setdefault(KIND_OF[type(row)], []).append(row)
        for kind, its_rows in by_kind.items():
            try:
                table = to_table(kind, its_rows)
            except Exception:
                # Losing rows is acceptable; losing the writer's thread is not, for nothing else empties its queue.
                logger.exception("records: %d rows are of no use", len(its_rows))
                self._lost[kind] += len(its_rows)
            else:
                self._pending.setdefault(kind, []).append(table)

    def rotate(self, now: float) -> None:
        """Writes all pending rows if they are due by age or size."""
        size = sum(table.nbytes for tables in self._pending.values() for table in tables)
        if self._pending and (now - self._since >= ROTATE_S or size >= ROTATE_BYTES):
            self._write(ended=False)

    def close(self) -> None:
        """Writes all pending rows."""
        self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        pending, self._pending = self._pending, {}
        for kind, tables in pending.items():
            table = pa.concat_tables(tables)
            try:
                self._write_file(kind, table)
            except (OSError, pa.ArrowException) as error:
                self._lost[kind] += table.num_rows
                self._note(str(error))
            else:
                self.written[kind] += table.num_rows
                self._note("")
        try:
            self._remove_oldest()
            self._write_about(ended)
        except (OSError, pa.ArrowException) as error:
            self._note(str(error))

    def _write_file(self, kind: str, table: pa.Table) -> None:
        self._files += 1
        final = self.directory / f"{kind}-{self._files:06d}.parquet"
        self.directory.mkdir(parents=True, exist_ok=True)
        with appearing(final) as part:
            pq.write_table(table.replace_schema_metadata(metadata(self._books.about)), part, compression="zstd")

    def _write_about(self, ended: bool) -> None:
        if not self.directory.is_dir():
            return
        self._books.dropped, self._books.ended = self.dropped(), ended
        _write_books(self.directory, self._books)

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
        is_own = file.parent == self.directory
        if file.suffix == ".parquet":
            # What an earlier process left may be damaged, and goes all the same.
            with suppress(OSError, pa.ArrowException, ValueError, KeyError):
                books = self._books if is_own else msgspec.json.decode((file.parent / ABOUT).read_bytes(), type=Books)
                books.removed[file.name.partition("-")[0]] += pq.read_metadata(file).num_rows
                _write_books(file.parent, books)
        file.unlink()
        left = [each.name for each in file.parent.iterdir()]
        if not is_own and set(left) <= {ABOUT}:
            (file.parent / ABOUT).unlink(missing_ok=True)
            file.parent.rmdir()

    def _note(self, refused: str) -> None:
        """Logs a change: why files cannot be written, or that they are written again (`refused` is empty)."""
        if refused and refused != self._refused:
            logger.warning("records are dropped, %s cannot be written: %s", self.directory, refused)
        elif self._refused and not refused:
            logger.info("records are written again")
        self._refused = refused


def _write_books(directory: Path, books: Books) -> None:
    with appearing(directory / ABOUT) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(books)))
