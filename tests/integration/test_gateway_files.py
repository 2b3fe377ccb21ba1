"""Files, through OpenAI's client: stored, listed, bounded."""

from typing import Any

import openai
import pytest

from tests.integration.test_gateway_batches import serving


async def test_files():
    async with serving() as (_, client):
        files = [await client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in range(5)]
        assert files[3].bytes == 3
        assert files[3].filename == "3.jsonl"
        assert files[3].expires_at == files[3].created_at + 30 * 86400
        first = await client.files.list(limit=2)
        assert [each.id for each in first.data] == [files[4].id, files[3].id]
        assert first.has_more
        assert [each.id async for each in client.files.list(limit=2, order="asc")] == [each.id for each in files]
        assert (await client.files.list(purpose="batch_output")).data == []
        assert (await client.files.content(files[4].id)).content == b"xxxx"
        assert (await client.files.delete(files[4].id)).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(files[4].id)
        short = await client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
        assert short.expires_at == short.created_at + 3600


async def test_all_uploads_together_are_bounded(monkeypatch):
    monkeypatch.setattr("gateway.routes.files.MAX_UPLOADING_BYTES", 100_000)
    async with serving() as (running, client):
        with pytest.raises(openai.RateLimitError, match="uploaded at once"):
            await client.files.create(file=b"x" * 200_000, purpose="batch")
        assert (await client.files.create(file=b"x" * 50_000, purpose="batch")).bytes == 50_000
        assert running.server.gateway.uploading_bytes == 0


async def test_bad_uploads_name_the_field(monkeypatch):
    monkeypatch.setattr("gateway.routes.files.MAX_FILE_BYTES", 1000)
    async with serving(state_mib=1) as (running, client):
        form = {"purpose": "batch"}
        file = {"file": ("a", b"x")}
        hour = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}
        cases: list[tuple[dict[str, Any], int, str | None]] = [
            ({"data": {"purpose": "fine-tune"}, "files": file}, 400, "purpose"),
            ({"data": form, "files": {"other": ("a", b"x")}}, 400, "other"),
            ({"data": {**form, "file": "text"}, "files": {"x": ("a", b"x")}}, 400, "x"),
            ({"data": {**form, **hour}, "files": file}, 400, "expires_after.seconds"),
            ({"data": {**form, "expires_after[seconds]": "4000"}, "files": file}, 400, "expires_after"),
            ({"data": form, "files": {"file": ("a", b"x" * 1001)}}, 413, "file"),
            ({"data": form, "files": {"file": ("a", b"x" * 200_000)}}, 413, "file"),
            ({"json": form}, 415, None),
            ({"content": b"nothing", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, None),
            ({"content": b"nothing", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ]
        for call, status, param in cases:
            answer = await running.http.post("/v1/files", **call)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (call, answer.text)
        assert (await client.files.list()).data == []
        folder = running.server.gateway.batches.folder
        assert list((folder / "files").iterdir()) == []


async def test_a_full_store_says_so():
    async with serving(state_mib=1) as (_, client):
        kept = await client.files.create(file=b"x" * 700_000, purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=b"x" * 700_000, purpose="batch")
        assert refused.value.status_code == 413
        assert refused.value.code == "storage_full"
        await client.files.delete(kept.id)
        await client.files.create(file=b"x" * 700_000, purpose="batch")
