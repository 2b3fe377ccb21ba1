"""Files are stored whole or not at all, whether a client leaves or the disk is full."""

import asyncio
import contextlib
import errno
import io
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.storage.batches.lines import LineAnswer
from gateway.storage.batches.objects import Batch
from gateway.storage.batches.store import BatchStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    with contextlib.closing(BatchStore(tmp_path, 1 << 30)) as store:
        yield store


async def test_a_row_never_lacks_its_file(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, left, written = asyncio.Event(), asyncio.Event(), asyncio.Event()
    run = store.run

    async def late(work: Callable[[sqlite3.Connection], Any]) -> None:
        writing.set()
        await left.wait()
        await run(work)
        written.set()

    monkeypatch.setattr(store, "run", late)
    upload = asyncio.create_task(store.add_file(io.BytesIO(b"{}"), "in.jsonl", "me", 3600.0))
    await writing.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    left.set()
    await written.wait()
    monkeypatch.undo()
    (file,) = await store.files("me", None)
    assert store.path(file["id"]).read_bytes() == b"{}"


async def test_uploads_and_batches_that_a_full_disk_ends_leave_no_files(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: Any = Mock(read=Mock(side_effect=[b"{", OSError(errno.ENOSPC, "No space left on device")]))
    with pytest.raises(OSError, match="No space left"):
        await store.add_file(full, "in.jsonl", "me", 3600.0)
    assert not list((tmp_path / "files").iterdir())
    file = await store.add_file(io.BytesIO(b"{}"), "in.jsonl", "me", 3600.0)
    times: Any = {"created_at": 0, "expires_at": 1, "lifetime_s": 3600.0}
    batch = Batch(id="b1", endpoint="/v1/completions", input_file_id=file.id, status="finalizing", owner="me", **times)
    await store.add_batch(batch, "demo")
    await store.add_answers(batch.id, [(0, LineAnswer("a", 200, None, "", None))])
    monkeypatch.setattr(store, "_end", AsyncMock(side_effect=sqlite3.OperationalError("database or disk is full")))
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError):
            await store.finish(await store.batch(batch.id), "completed")
    assert [path.name for path in (tmp_path / "files").iterdir()] == [file.id]
