"""A batch whose input file is gone ends."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.config import Settings
from gateway.storage.batches.objects import Answer, Batch, Counts, Status
from gateway.storage.batches.serving import BATCHES_AT_ONCE, Batches


@pytest.mark.parametrize("status", ["validating", "in_progress", "cancelling", "finalizing"])
async def test_it_fails_with_what_was_answered(tmp_path: Path, status: Status) -> None:
    batches = Batches(tmp_path, Settings(), "demo")
    store, now = batches.store, int(time.time())
    file = await store.add_file(io.BytesIO(b"{}"), "in.jsonl", "me", 3600.0)
    batch = Batch(id="b", endpoint="/v1/completions", input_file_id=file.id, created_at=now, expires_at=now + 60)
    await store.add_batch(batch, "me", "demo", 3600.0)
    await store.change("b", None, lambda before: replace(before, status=status, request_counts=Counts(2)))
    await store.add_answers("b", [(1, Answer("r", 200, None, "", None))])
    store.path(file.id).unlink()
    await batches._to_its_end("b")
    ended = (await store.batch("b")).batch
    assert ended.status == ("completed" if status == "finalizing" else "failed")
    if ended.status == "failed":
        assert ended.errors is not None
        assert [each.code for each in ended.errors.data] == ["input_file_missing"]
    assert ended.output_file_id is not None
    assert await store.open_batches("demo") == []
    await batches.close()


async def test_those_that_cannot_go_on_now_hold_no_place_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(tmp_path, Settings(), "demo")
    store, now = batches.store, int(time.time())
    file = await store.add_file(io.BytesIO(b"{}"), "in.jsonl", "me", 3600.0)
    tried = []

    async def carry_out(batch_id: str) -> None:
        tried.append(batch_id)
        raise OSError

    monkeypatch.setattr(batches, "_to_its_end", carry_out)
    names = [f"b{number:02}" for number in range(BATCHES_AT_ONCE + 1)]
    for name in names:
        batch = Batch(id=name, endpoint="/v1/completions", input_file_id=file.id, created_at=now, expires_at=now + 60)
        await store.add_batch(batch, "me", "demo", 3600.0)
    for _ in range(2):
        await batches._begin_batches()
        await asyncio.gather(*batches._running.values())
    assert sorted(tried) == names
    await batches.close()
