"""An upload whose client leaves is stored whole or not at all."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.store import Store


async def test_a_row_never_lacks_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1 << 30)
    writing, left = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    transact = store._transact

    def late(work: Callable[[sqlite3.Connection], Any]) -> Any:
        loop.call_soon_threadsafe(writing.set)
        assert left.wait(10)
        return transact(work)

    monkeypatch.setattr(store, "_transact", late)
    upload = asyncio.create_task(store.add_file(io.BytesIO(b"{}"), "in.jsonl", "me", 3600.0))
    await writing.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    left.set()
    (file,) = await store.files("me", None)
    assert store.path(file["id"]).read_bytes() == b"{}"
    store.close()
