"""Stores files and batches: rows in SQLite, contents in a folder.

Several gateways on one host may share a folder.  Every change of a batch is one transaction that reads the batch first.  An
answer and its count are written together, so that each line is counted once, even if two gateways carried it out.
"""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
from openai.types import BatchRequestCounts, FileObject

from gateway.http.errors import Conflict, NotFound, StorageFull, TooManyRequests
from gateway.storage.batches.lines import LineAnswer, new_id
from gateway.storage.batches.objects import OPEN, Batch, Status, added
from gateway.storage.sqlite import Database, exclusive, transaction

FILE_LIFETIME_S = 30 * 86400
"""Seconds that files are kept; as with OpenAI.  Batches are forgotten after that time too."""
WINDOW_S = 86400
"""The only completion window: 24 h."""
MAX_OPEN = 100
"""Most unfinished batches of one owner."""
ORPHAN_S = 3600.0
"""Seconds before a file without a row is deleted.  A younger one may be in the making."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, purpose TEXT, bytes INTEGER, expires REAL, body BLOB);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, created REAL, model TEXT, status TEXT, input TEXT, lifetime REAL,
    body BLOB);
CREATE TABLE IF NOT EXISTS answers (batch TEXT, line INTEGER, failed INTEGER, answer BLOB, PRIMARY KEY (batch, line));
"""


class BatchStore(Database):
    """The store.  `max_bytes` bounds all contents together.  A file or batch is found only by its owner."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._contents = folder / "files"
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(folder / "batches.sqlite", _SCHEMA)
        self._max_bytes = max_bytes

    # Files

    def path(self, file_id: str) -> Path:
        return self._contents / file_id

    @transaction
    def require_room(self, db: sqlite3.Connection, size: int) -> None:
        """Raises `StorageFull` if there is no room for a file of `size` bytes, before its copy fills the disk for others."""
        self._check_room(db, size)

    async def add_file(self, source: BinaryIO, name: str, owner: str, lifetime_s: float) -> FileObject:
        """Stores the contents of `source`.  Raises `StorageFull`."""
        file_id = new_id("file-")
        size = await asyncio.to_thread(_copy, source, self.path(file_id))
        file = _new_file(file_id, size, name, "batch", lifetime_s)

        def work(db: sqlite3.Connection) -> None:
            self._check_room(db, size)
            _insert_file(db, file, owner)

        async def write() -> None:
            try:
                await self.run(work)
            except Exception:
                self.path(file_id).unlink(missing_ok=True)
                raise

        # A row is written even where the client has left; its file must then stay.
        await asyncio.shield(write())
        return file

    @transaction
    def file(self, db: sqlite3.Connection, file_id: str, owner: str) -> FileObject:
        """The file `file_id` of `owner`.  Raises `NotFound`."""
        return _file(db, file_id, owner)

    @transaction
    def files(self, db: sqlite3.Connection, owner: str, purpose: str | None) -> list[dict[str, Any]]:
        """Oldest first."""
        query = "SELECT body FROM files WHERE owner = ? AND purpose = coalesce(?, purpose) AND expires > ? ORDER BY number"
        return [msgspec.json.decode(body) for (body,) in db.execute(query, (owner, purpose, time.time()))]

    async def delete_file(self, file_id: str, owner: str) -> None:
        """Raises `NotFound`, or `Conflict` for a file that an unfinished batch reads."""

        def work(db: sqlite3.Connection) -> None:
            _file(db, file_id, owner)
            if db.execute(f"SELECT 1 FROM batches WHERE input = ? AND {_IS_OPEN}", (file_id,)).fetchone():
                raise Conflict("The file is the input of a batch that has not ended. Cancel the batch first.", param="file_id")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self.run(work)
        self.path(file_id).unlink(missing_ok=True)

    # Batches

    @exclusive
    def add_batch(self, db: sqlite3.Connection, batch: Batch, model: str) -> None:
        """`model` is the base model of the fleet that will carry it out.  Raises `NotFound` or `TooManyRequests`."""
        _file(db, batch.input_file_id, batch.owner, "input_file_id")
        self._check_room(db, 0)
        query = f"SELECT count(*) FROM batches WHERE owner = ? AND {_IS_OPEN}"
        if db.execute(query, (batch.owner,)).fetchone()[0] >= MAX_OPEN:
            raise TooManyRequests(f"{MAX_OPEN} batches have not ended yet.")
        of = (batch.id, batch.owner, batch.created_at, model, batch.status, batch.input_file_id, batch.lifetime_s)
        names = "id, owner, created, model, status, input, lifetime, body"
        db.execute(f"INSERT INTO batches ({names}) VALUES (?,?,?,?,?,?,?,?)", (*of, batch.model_dump_json()))

    @transaction
    def batch(self, db: sqlite3.Connection, batch_id: str, owner: str | None = None) -> Batch:
        """`owner` None: any owner's.  Raises `NotFound`."""
        return _batch(db, batch_id, owner)

    @transaction
    def batches(self, db: sqlite3.Connection, owner: str) -> list[dict[str, Any]]:
        """Oldest first."""
        query = "SELECT body FROM batches WHERE owner = ? ORDER BY number"
        return [msgspec.json.decode(body) for (body,) in db.execute(query, (owner,))]

    @transaction
    def open_batches(self, db: sqlite3.Connection, model: str) -> list[str]:
        """The ids of unfinished batches for this model, oldest first."""
        query = f"SELECT id FROM batches WHERE model = ? AND {_IS_OPEN} ORDER BY number"
        return [each for (each,) in db.execute(query, (model,))]

    @exclusive
    def change(self, db: sqlite3.Connection, batch_id: str, owner: str | None, change: Callable[[Batch], Batch]) -> Batch:
        """Replaces a batch by what `change`, which may raise, makes of it.  Raises `NotFound`."""
        batch = change(_batch(db, batch_id, owner))
        _write(db, batch)
        return batch

    # Answers

    @transaction
    def answered(self, db: sqlite3.Connection, batch_id: str) -> set[int]:
        """The numbers of the lines that have an answer."""
        return {line for (line,) in db.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    @exclusive
    def add_answers(self, db: sqlite3.Connection, batch_id: str, answers: Iterable[tuple[int, LineAnswer]]) -> None:
        """Stores and counts answers.  A line keeps its first answer."""
        batch = _batch(db, batch_id, None)
        counts, usage = batch.request_counts, batch.usage
        completed, failed = counts.completed, counts.failed
        for line, answer in answers:
            row = (batch_id, line, answer.failed, answer.line())
            if db.execute("INSERT OR IGNORE INTO answers VALUES (?,?,?,?)", row).rowcount:
                completed, failed = completed + (not answer.failed), failed + answer.failed
                usage = added(usage, answer.usage)
        counts = BatchRequestCounts(total=counts.total, completed=completed, failed=failed)
        _write(db, batch.model_copy(update={"request_counts": counts, "usage": usage}))

    async def finish(self, batch: Batch, last: Status) -> None:
        """Writes the answers into files, and sets the batch's last status."""
        output = error = None
        try:
            output = await self._write_answers(batch, "output", failed=False)
            error = await self._write_answers(batch, "error", failed=True)
            await self._end(batch.id, last, output, error)
        except Exception:
            # The next attempt writes others.
            for file in filter(None, (output, error)):
                self.path(file.id).unlink(missing_ok=True)
            raise

    @exclusive
    def _end(
        self, db: sqlite3.Connection, batch_id: str, last: Status, output: FileObject | None, error: FileObject | None
    ) -> None:
        batch = _batch(db, batch_id, None)
        for file in filter(None, (output, error)):
            _insert_file(db, file, batch.owner)
        _write(db, batch.entering(last, output_file_id=output and output.id, error_file_id=error and error.id))
        db.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))

    @transaction
    def _write_answers(self, db: sqlite3.Connection, batch: Batch, name: str, *, failed: bool) -> FileObject | None:
        file_id = new_id("file-")
        query = "SELECT answer FROM answers WHERE batch = ? AND failed = ? ORDER BY line"
        rows: Iterator[tuple[bytes]] = db.execute(query, (batch.id, failed))
        with _new(self.path(file_id)) as target:
            target.writelines(part for (answer,) in rows for part in (answer, b"\n"))
            size = target.tell()
        if not size:
            self.path(file_id).unlink()
            return None
        return _new_file(file_id, size, f"{batch.id}_{name}.jsonl", "batch_output", batch.lifetime_s)

    # Room

    async def sweep(self) -> None:
        """Drops expired files and batches, and contents without a row, which a killed gateway has left."""

        def work(db: sqlite3.Connection) -> set[str]:
            now = time.time()
            are_read = f"SELECT input FROM batches WHERE {_IS_OPEN}"
            db.execute(f"DELETE FROM files WHERE expires <= ? AND id NOT IN ({are_read})", (now,))
            db.execute(f"DELETE FROM batches WHERE created < ? AND NOT {_IS_OPEN}", (now - FILE_LIFETIME_S,))
            return {each for (each,) in db.execute("SELECT id FROM files")}

        await asyncio.to_thread(_unlink_strangers, self._contents, await self.run(work))

    def _check_room(self, db: sqlite3.Connection, more: int) -> None:
        held = db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0]
        held += db.execute("SELECT coalesce(sum(length(answer)), 0) FROM answers").fetchone()[0]
        if held + more > self._max_bytes:
            raise StorageFull("The files that are kept take all the room there is. Delete some, or wait until they expire.")


_IS_OPEN = f"status IN ({', '.join(repr(each) for each in sorted(OPEN))})"


def _file(db: sqlite3.Connection, file_id: str, owner: str, param: str = "file_id") -> FileObject:
    query = "SELECT body FROM files WHERE id = ? AND owner = ? AND expires > ?"
    row = db.execute(query, (file_id, owner, time.time())).fetchone()
    if row is None:
        raise NotFound("There is no such file, or it has expired.", param=param)
    return FileObject.model_validate_json(row[0])


def _new_file(file_id: str, size: int, name: str, purpose: Literal["batch", "batch_output"], lifetime_s: float) -> FileObject:
    now = int(time.time())
    return FileObject(
        id=file_id,
        object="file",
        status="processed",
        bytes=size,
        created_at=now,
        filename=name,
        purpose=purpose,
        expires_at=now + int(lifetime_s),
    )


def _insert_file(db: sqlite3.Connection, file: FileObject, owner: str) -> None:
    row = (file.id, owner, file.purpose, file.bytes, file.expires_at, file.model_dump_json())
    db.execute("INSERT INTO files (id, owner, purpose, bytes, expires, body) VALUES (?,?,?,?,?,?)", row)


def _batch(db: sqlite3.Connection, batch_id: str, owner: str | None) -> Batch:
    query = "SELECT body, owner, lifetime FROM batches WHERE id = ? AND owner = coalesce(?, owner)"
    row = db.execute(query, (batch_id, owner)).fetchone()
    if row is None:
        raise NotFound("There is no such batch, or it is not kept any more.", param="batch_id")
    return Batch.model_validate_json(row[0]).model_copy(update={"owner": row[1], "lifetime_s": row[2]})


def _write(db: sqlite3.Connection, batch: Batch) -> None:
    row = (batch.status, batch.model_dump_json(), batch.id)
    db.execute("UPDATE batches SET status = ?, body = ? WHERE id = ?", row)


@contextlib.contextmanager
def _new(path: Path) -> Iterator[BinaryIO]:
    """A new file to write; removed if that fails, because a part of it would keep a full disk full."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            yield target
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _copy(source: BinaryIO, path: Path) -> int:
    with _new(path) as target:
        shutil.copyfileobj(source, target, 1 << 20)
        return target.tell()


def _unlink_strangers(folder: Path, known: set[str]) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.name not in known and path.stat().st_mtime < time.time() - ORPHAN_S:
                path.unlink()
