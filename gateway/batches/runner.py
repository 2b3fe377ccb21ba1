"""Carries out batches: checks their files, has their lines answered, writes output files.  The gateway's event loop.

Of the gateways that share a folder and serve one model, only the one that holds a lock carries out batches.  The operating
system frees the lock when its process ends in any way.  Then another gateway goes on: answers are stored as they come, and
lines without an answer are carried out again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from gateway.batches import lines
from gateway.batches.calls import RETRIED, Calls
from gateway.batches.objects import Answer, Batch, Counts, Errors
from gateway.batches.pace import Pace
from gateway.batches.store import Kept, Store
from gateway.errors import NotFound
from gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks for batches that another gateway has accepted or cancelled."""
SWEEP_S = 600.0
"""Seconds between removals of expired files."""
BATCHES_AT_ONCE = 16
"""Most batches at a time; their lines take turns."""
LINES_READ = 256
"""Most lines of one batch that are read and wait for their turn."""
TROUBLE_S = 10.0
"""Seconds before a batch that failed to go on is tried again."""
RETRY_S = (0.5, 30.0)
"""Seconds between attempts at a line that the fleet cannot serve now: first and longest wait."""
EXPIRED = {"code": "batch_expired", "message": "This request could not be executed before the completion window expired."}
CANCELLED = {"code": "batch_cancelled", "message": "This request was not executed: the batch was cancelled."}
FAILED = {"code": "server_error", "message": "The server had an error while processing this request."}


class _Ended(Exception):
    """The batch's time is over, or it was cancelled."""


class Runner:
    """Carries out the batches in `store` that are for the fleet's `model`.  `clock` gives Unix seconds."""

    def __init__(
        self,
        store: Store,
        calls: Calls,
        pace: Pace,
        metrics: GatewayMetrics,
        *,
        folder: Path,
        model: str,
        max_body_bytes: int,
        draining: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._calls, self._pace, self._metrics = store, calls, pace, metrics
        self._lock_path = folder / f"batches-{hashlib.sha256(model.encode()).hexdigest()[:16]}.lock"
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._draining = draining
        self._clock = clock
        self._lock: TextIO | None = None
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._pace.start()
        self._task = asyncio.create_task(self._run(), name="batches")

    async def close(self) -> None:
        """Stops lines that are being carried out.  The next gateway carries them out again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stop_all()
        await self._pace.close()
        if self._lock is not None:
            self._lock.close()

    def tell(self) -> None:
        """Looks at once: a batch was created or cancelled."""
        self._news.set()

    async def _run(self) -> None:
        swept = float("-inf")
        while not self._draining():
            try:
                if self._have_lock():
                    if time.monotonic() - swept > SWEEP_S:
                        swept = time.monotonic()
                        await self._store.sweep()
                    await self._begin_batches()
            except Exception:
                logger.exception("looking for batches failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_S)
            self._news.clear()
        # Batches would delay the gateway's end.  The next gateway goes on with them.
        await self._stop_all()

    def _have_lock(self) -> bool:
        if self._lock is None:
            file = self._lock_path.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                return False
            self._lock = file
        return True

    async def _begin_batches(self) -> None:
        for batch_id in await self._store.open_batches(self._model):
            if len(self._running) == BATCHES_AT_ONCE:
                return
            if batch_id not in self._running:
                task = asyncio.create_task(self._carry_out(batch_id), name=batch_id)
                self._running[batch_id] = task
                task.add_done_callback(partial(self._ended, batch_id))

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._running[batch_id]
        self._news.set()

    async def _stop_all(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # One batch

    async def _carry_out(self, batch_id: str) -> None:
        try:
            await self._to_its_end(batch_id)
        except NotFound:
            pass
        except Exception as error:
            # For example, the disk is full.  The batch stays open and is tried again.
            logger.error("batch %s cannot go on", batch_id, exc_info=error)
            await asyncio.sleep(TROUBLE_S)

    async def _to_its_end(self, batch_id: str) -> None:
        """Carries out a batch from whatever state it is in."""
        kept = await self._store.batch(batch_id)
        if kept.batch.status == "validating":
            kept = await self._check(kept)
        if kept.batch.status == "failed":
            return
        try:
            if kept.batch.status == "in_progress":
                await self._answer_lines(kept)
                await self._finalize(batch_id)
        except* _Ended:
            pass
        await self._finish(batch_id)

    async def _check(self, kept: Kept) -> Kept:
        batch = kept.batch
        path = self._store.path(batch.input_file_id)
        checked = await asyncio.to_thread(lines.check, path, batch.endpoint, self._max_body_bytes)

        def change(now: Batch) -> Batch:
            if now.status != "validating":
                return now
            at = int(self._clock())
            if checked.errors:
                return replace(now, status="failed", failed_at=at, errors=Errors(checked.errors))
            counts = Counts(total=checked.total)
            return replace(now, status="in_progress", in_progress_at=at, model=checked.model, request_counts=counts)

        return replace(kept, batch=await self._store.change(batch.id, None, change))

    async def _answer_lines(self, kept: Kept) -> None:
        """Answers the remaining lines.  Raises `_Ended`, in a group, if the batch must end before."""
        batch = kept.batch
        done = await self._store.answered(batch.id)
        to_read = lines.read(self._store.path(batch.input_file_id), self._max_body_bytes)
        waiting = asyncio.Semaphore(LINES_READ)

        async def answer(number: int, text: bytes) -> None:
            try:
                result = await self._answer(text, kept.owner)
                await self._store.add_answers(batch.id, [(number, result)])
            finally:
                waiting.release()

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(batch))
            while (read := await asyncio.to_thread(next, to_read, None)) is not None:
                number, text = read
                if number not in done and text is not None:
                    await waiting.acquire()
                    group.create_task(answer(number, text))
            for _ in range(LINES_READ):
                await waiting.acquire()
            watching.cancel()

    async def _watch(self, batch: Batch) -> None:
        """Raises `_Ended` when the batch was cancelled or its time is over."""
        while True:
            now = await self._store.batch(batch.id)
            if now.batch.status != "in_progress" or self._clock() >= batch.expires_at:
                raise _Ended
            await asyncio.sleep(LOOK_S)

    async def _answer(self, text: bytes, owner: str) -> Answer:
        """Answers one line, with as many attempts as it takes."""
        line = await asyncio.to_thread(lines.parsed, text) if len(text) > 1 << 16 else lines.parsed(text)
        wait_s, most_s = RETRY_S
        while True:
            try:
                async with self._pace.turn():
                    answer = await self._calls.answer(line, owner)
            except Exception:
                logger.exception("a line of a batch failed")
                answer = Answer(line.custom_id, 500, None, "", FAILED)
            if answer.status not in RETRIED:
                self._metrics.batch_line(answer.status)
                return answer
            await asyncio.sleep(random.uniform(0.5, 1) * wait_s)
            wait_s = min(2 * wait_s, most_s)

    async def _finalize(self, batch_id: str) -> None:
        """Sets the status `finalizing`, unless the batch was cancelled."""

        def change(now: Batch) -> Batch:
            if now.status != "in_progress":
                return now
            return replace(now, status="finalizing", finalizing_at=int(self._clock()))

        await self._store.change(batch_id, None, change)

    async def _finish(self, batch_id: str) -> None:
        """Stores errors for lines without an answer, writes the files, and sets the last status."""
        kept = await self._store.batch(batch_id)
        cancelled, expired = kept.batch.status == "cancelling", kept.batch.status == "in_progress"
        if expired or (cancelled and kept.batch.request_counts.total):
            await self._give_up_rest(kept, CANCELLED if cancelled else EXPIRED)

        def ended(now: Batch) -> Batch:
            at = int(self._clock())
            if cancelled:
                return replace(now, status="cancelled", cancelled_at=at)
            if expired:
                return replace(now, status="expired", expired_at=at)
            return replace(now, status="completed", completed_at=at)

        await self._store.finish(batch_id, ended)

    async def _give_up_rest(self, kept: Kept, why: dict[str, str]) -> None:
        done = await self._store.answered(kept.batch.id)
        path = self._store.path(kept.batch.input_file_id)

        def rest() -> list[tuple[int, Answer]]:
            left = [each for each in lines.read(path, self._max_body_bytes) if each[0] not in done]
            return [(number, Answer(lines.parsed(text).custom_id, 0, None, "", why)) for number, text in left if text]

        await self._store.add_answers(kept.batch.id, await asyncio.to_thread(rest))
