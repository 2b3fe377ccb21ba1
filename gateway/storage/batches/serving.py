"""Carries out batches: checks their files, has their lines answered, writes output files.  The gateway's event loop.

Of the gateways that share a folder and serve one model, only the one that holds a lock carries out batches.  When its process
ends, another gateway goes on: answers are stored as they come, and lines without an answer are carried out again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fastapi import FastAPI
from openai.types import BatchError, BatchRequestCounts
from openai.types.batch import Errors

from backend.config import Settings
from gateway.http.errors import BadRequest
from gateway.http.guard import MAX_BODY_BYTES
from gateway.storage.batches import lines
from gateway.storage.batches.calls import carry_out
from gateway.storage.batches.lines import LineAnswer
from gateway.storage.batches.objects import Batch, Status
from gateway.storage.batches.pace import BatchPace
from gateway.storage.batches.store import BatchStore
from gateway.storage.sqlite import lock

if TYPE_CHECKING:
    from gateway.state import Gateway

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
MISSING = "The input file is gone.  Lines that were answered before are in the output file."
GONE = Errors(data=[BatchError(code="input_file_missing", message=MISSING)], object="list")
FAILED = {"code": "server_error", "message": "The server had an error while processing this request."}


class _Ended(Exception):
    """The batch's time is over, or it was cancelled."""


class Batches:
    """The files and batches of one gateway process.  `folder` is None where nothing is stored; `model` is the fleet's model."""

    def __init__(self, folder: Path | None, settings: Settings, model: str) -> None:
        self.folder = folder
        self.model = model
        self._store = None if folder is None else BatchStore(folder, settings.gateway.files_bytes)
        self._lock: TextIO | None = None
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}
        """When batches that could not go on are tried again (monotonic seconds).  Others have their places until then."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def store(self) -> BatchStore:
        """The store.  Raises `BadRequest` where there is none."""
        if self._store is None:
            raise BadRequest("This server keeps no files (`gateway.state_dir` is `none`).", code="not_stored")
        return self._store

    def start(self, app: FastAPI, gateway: Gateway) -> None:
        """Begins to carry out stored batches that are for the fleet's model, through the routes of `app`."""
        self._app, self._gateway, self._core = app, gateway, gateway.client.core
        self._pace = BatchPace(self._core, gateway.settings.verifier.max_num_seqs)
        # Sequences of keys with the priority `batch` are paced too.
        self._tasks = [asyncio.create_task(self._pace.keep())]
        if self.folder is not None:
            digest = hashlib.sha256(self.model.encode()).hexdigest()[:16]
            self._lock_path = self.folder / f"batches-{digest}.lock"
            self._tasks.append(asyncio.create_task(self._run()))

    async def close(self) -> None:
        """Stops lines that are being carried out.  The next gateway carries them out again."""
        await _end(self._tasks)
        await _end(self._running.values())
        if self._lock is not None:
            self._lock.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    def tell(self) -> None:
        """Looks at once: a batch was created or cancelled."""
        self._news.set()

    async def _run(self) -> None:
        swept = float("-inf")
        while not self._core.draining:
            try:
                self._lock = self._lock or lock(self._lock_path)
                if time.monotonic() - swept > SWEEP_S:
                    swept = time.monotonic()
                    await self.store.sweep()
                await self._begin_batches()
            except BlockingIOError:
                # Another gateway carries them out.
                pass
            except Exception:
                logger.exception("looking for batches failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_S)
            self._news.clear()
        # Batches would delay the gateway's end.  The next gateway goes on with them.
        await _end(self._running.values())

    async def _begin_batches(self) -> None:
        for batch_id in await self.store.open_batches(self.model):
            if len(self._running) == BATCHES_AT_ONCE:
                return
            if batch_id not in self._running and time.monotonic() >= self._again_at.get(batch_id, 0.0):
                self._running[batch_id] = asyncio.create_task(self._carry_out(batch_id), name=batch_id)

    # One batch

    async def _carry_out(self, batch_id: str) -> None:
        try:
            await self._to_its_end(batch_id)
            self._again_at.pop(batch_id, None)
        except Exception:
            # For example, the disk is full.  The batch stays open and is tried again.
            logger.exception("batch %s cannot go on", batch_id)
            self._again_at[batch_id] = time.monotonic() + TROUBLE_S
        finally:
            del self._running[batch_id]
            self._news.set()

    async def _to_its_end(self, batch_id: str) -> None:
        """Carries out a batch from whatever state it is in."""
        batch = await self.store.batch(batch_id)
        there = await asyncio.to_thread(self.store.path(batch.input_file_id).is_file)
        if not there and batch.status != "finalizing":
            await self.store.change(batch_id, None, lambda now: now.model_copy(update={"errors": GONE}))
            await self.store.finish(batch, "failed")
            return
        if batch.status == "validating":
            batch = await self._check(batch)
        if batch.status == "failed":
            return
        try:
            if batch.status == "in_progress":
                await self._answer_lines(batch)
                await self._advance(batch_id, "in_progress", "finalizing")
        except* _Ended:
            pass
        await self._finish(batch_id)

    async def _check(self, batch: Batch) -> Batch:
        path = self.store.path(batch.input_file_id)
        checked = await asyncio.to_thread(lines.check, path, batch.endpoint, MAX_BODY_BYTES)
        if checked.errors:
            errors = Errors(data=[BatchError(**each._asdict()) for each in checked.errors], object="list")
            return await self._advance(batch.id, "validating", "failed", errors=errors)
        counts = BatchRequestCounts(total=checked.total, completed=0, failed=0)
        return await self._advance(batch.id, "validating", "in_progress", model=checked.model, request_counts=counts)

    async def _advance(self, batch_id: str, left: Status, entered: Status, **fields: Any) -> Batch:
        """Changes a batch's status, and `fields`, unless it was changed meanwhile: the batch may be cancelled."""

        def change(now: Batch) -> Batch:
            return now.entering(entered, **fields) if now.status == left else now

        return await self.store.change(batch_id, None, change)

    async def _answer_lines(self, batch: Batch) -> None:
        """Answers the remaining lines.  Raises `_Ended`, in a group, if the batch must end before."""
        done = await self.store.answered(batch.id)
        to_read = lines.read(self.store.path(batch.input_file_id))
        waiting = asyncio.Semaphore(LINES_READ)

        async def answer(number: int, text: bytes) -> None:
            await self.store.add_answers(batch.id, [(number, await self._answer(text, batch.owner))])

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(batch))
            async with asyncio.TaskGroup() as answering:
                while (read := await asyncio.to_thread(next, to_read, None)) is not None:
                    if read[0] not in done:
                        await waiting.acquire()
                        answering.create_task(answer(*read)).add_done_callback(lambda _: waiting.release())
            watching.cancel()

    async def _watch(self, batch: Batch) -> None:
        """Raises `_Ended` when the batch was cancelled or its time is over."""
        while True:
            now = await self.store.batch(batch.id)
            if now.status != "in_progress" or time.time() >= batch.expires_at:
                raise _Ended
            await asyncio.sleep(LOOK_S)

    async def _answer(self, text: bytes, owner: str) -> LineAnswer:
        """Answers one line, with as many attempts as it takes."""
        line = await asyncio.to_thread(lines.parsed, text) if len(text) > 1 << 16 else lines.parsed(text)
        wait_s, most_s = RETRY_S
        while True:
            try:
                async with self._pace.turn():
                    answer = await carry_out(line, owner, self._app, self._gateway)
            except Exception:
                logger.exception("a line of a batch failed")
                answer = LineAnswer(line.custom_id, 500, None, "", FAILED)
            if answer is not None:
                self._gateway.metrics.batch_lines.labels(str(answer.status)).inc()
                return answer
            await asyncio.sleep(random.uniform(0.5, 1) * wait_s)
            wait_s = min(2 * wait_s, most_s)

    async def _finish(self, batch_id: str) -> None:
        """Stores errors for lines without an answer, writes the files, and sets the last status."""
        batch = await self.store.batch(batch_id)
        cancelled, expired = batch.status == "cancelling", batch.status == "in_progress"
        if expired or (cancelled and batch.request_counts.total):
            await self._give_up_rest(batch, CANCELLED if cancelled else EXPIRED)
        await self.store.finish(batch, "cancelled" if cancelled else "expired" if expired else "completed")

    async def _give_up_rest(self, batch: Batch, why: dict[str, str]) -> None:
        done = await self.store.answered(batch.id)
        path = self.store.path(batch.input_file_id)

        def rest() -> list[tuple[int, LineAnswer]]:
            left = [each for each in lines.read(path) if each[0] not in done]
            return [(number, LineAnswer(lines.parsed(text).custom_id, 0, None, "", why)) for number, text in left]

        await self.store.add_answers(batch.id, await asyncio.to_thread(rest))


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
