"""SQLite files, each accessed from one thread beside the event loop, and locks, for gateways that share a folder."""

import asyncio
import fcntl
import sqlite3
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
DatabaseT = TypeVar("DatabaseT", bound="Database")
Work = Callable[Concatenate[DatabaseT, sqlite3.Connection, P], T]
Method = Callable[Concatenate[DatabaseT, P], Coroutine[Any, Any, T]]

BUSY_S = 5.0
"""Seconds that one gateway waits while another writes."""
RETRY_S = 0.05


class Database:
    """A SQLite database.  File and folder are created for this user only.  Raises `OSError`."""

    def __init__(self, path: Path, schema: str = "") -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.stem)
        self._connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; {schema}")
                return
            except sqlite3.Error as error:
                # While another makes the file, SQLite refuses the first of these at once.
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise OSError(f"{path.name}: {error}") from None
            time.sleep(RETRY_S)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `work` as one transaction on the database's thread.  The transaction is rolled back if `work` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:
            return work(self._connection)

    def close(self) -> None:
        """Waits for pending transactions, and closes the file."""
        self._thread.shutdown()
        self._connection.close()


def transaction(work: Work[DatabaseT, P, T]) -> Method[DatabaseT, P, T]:
    """Turns a function on a connection into an async method that runs it as one transaction."""

    @wraps(work)
    async def method(self: DatabaseT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(lambda db: work(self, db, *args, **kwargs))

    return method


def exclusive(work: Work[DatabaseT, P, T]) -> Method[DatabaseT, P, T]:
    """As `transaction`, but locks first, so that no other process writes between its reads and writes."""

    @wraps(work)
    def locked(self: DatabaseT, db: sqlite3.Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        db.execute("BEGIN IMMEDIATE")
        return work(self, db, *args, **kwargs)

    return transaction(locked)


def lock(path: Path) -> TextIO:
    """Locks a file until it is closed, or this process ends in any way.  Raises `BlockingIOError` if it is locked."""
    file = path.open("w")
    try:
        # Pids would not do: containers that share a folder have the same.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
