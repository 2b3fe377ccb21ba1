"""Files are stored whole or not at all, whether a client leaves or the disk is full."""

import asyncio
import errno
import io
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.storage.batches.objects import Batch, LineAnswer
from gateway.storage.batches.store import BatchStore


async def test_a_row_never_lacks_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path, 1 << 30)
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
    store.close()


async def test_no_part_of_an_upload_keeps_a_full_disk_full(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 30)
    full: Any = Mock(read=Mock(side_effect=[b"{", OSError(errno.ENOSPC, "No space left on device")]))
    with pytest.raises(OSError, match="No space left"):
        await store.add_file(full, "in.jsonl", "me", 3600.0)
    assert not list((tmp_path / "files").iterdir())
    store.close()


async def test_attempts_to_end_a_batch_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path, 1 << 30)
    file = await store.add_file(io.BytesIO(b"{}"), "in.jsonl", "me", 3600.0)
    batch = Batch(
        id="batch_1", endpoint="/v1/completions", input_file_id=file.id, status="finalizing", created_at=0, expires_at=1
    )
    await store.add_batch(batch, "me", "demo", 3600.0)
    await store.add_answers(batch.id, [(0, LineAnswer("a", 200, None, "", None))])
    monkeypatch.setattr(store, "_end", AsyncMock(side_effect=sqlite3.OperationalError("database or disk is full")))
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError):
            await store.finish(await store.batch(batch.id), "completed")
    assert [path.name for path in (tmp_path / "files").iterdir()] == [file.id]
    store.close()
