"""Writes records while serving: a bounded queue between the engine thread and a thread that writes parquet files.

The engine thread appends to the queue in a few hundred nanoseconds, without waiting, waking a thread or taking a lock.  The
writer empties the queue twice a second.  Rows that do not fit are dropped and counted.
"""

import logging
import threading
import time
from collections import deque

from backend.config import RecordsSettings
from backend.records.rows import Row
from backend.records.schema import KIND_OF, About
from backend.records.store import RecordStore

logger = logging.getLogger(__name__)

DRAIN_EVERY_S = 0.5
CHUNK_ROWS = 4096
"""Rows converted to columns at a time.  More would hold the interpreter, which the engine thread needs too, for longer."""
CLOSE_TIMEOUT_S = 5.0
QUEUE_ROWS = 200_000
"""Largest number of rows that wait for the writer; further rows are dropped."""


class FileRecorder:
    """Records one verifier's rows.  Only the engine thread may call `put`; any thread may call `start` and `close`."""

    def __init__(self, about: About, settings: RecordsSettings) -> None:
        self._store = RecordStore(about, settings)
        self._queue: deque[Row] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)

    def start(self) -> None:
        logger.info("records go to %s", self._store.directory)
        self._thread.start()

    def close(self) -> None:
        """Writes the queued rows and ends the thread; gives up after `CLOSE_TIMEOUT_S` if the disk does not answer."""
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("records: the last ones were not written within %g s", CLOSE_TIMEOUT_S)

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Rows written and rows dropped so far, by kind; called by the engine thread."""
        return dict(self._store.written), self._store.dropped()

    # -- the engine thread ---------------------------------------------------------------------------------------------

    def put(self, row: Row) -> None:
        """Queues a row for the writer, or drops and counts it if the queue is full."""
        if len(self._queue) < QUEUE_ROWS:
            self._queue.append(row)
        else:
            self._store.overflow[KIND_OF[type(row)]] += 1

    # -- the writer's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(DRAIN_EVERY_S)
            for waiting in range(len(self._queue), 0, -CHUNK_ROWS):
                chunk = [self._queue.popleft() for _ in range(min(waiting, CHUNK_ROWS))]
                self._store.add(chunk, time.monotonic())
            self._store.rotate(time.monotonic())
        self._store.close()
