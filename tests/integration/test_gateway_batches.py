"""Files and batches, through OpenAI's client, in front of a fake verifier."""

import asyncio
import contextlib
import json
import sqlite3
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.storage.batches import serving as batching
from gateway.storage.batches.lines import LONGEST_ID
from gateway.storage.batches.store import BatchStore
from tests.support.fake_verifier import count_up, eventually, silence
from tests.support.running_gateway import CHAT, COMPLETION, RESPONSE, Keys, running_gateway

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(batching, "LOOK_S", 0.05)


def request(custom_id, body=CHAT, url=CHATS, **fields):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


def jsonl(*lines):
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


@asynccontextmanager
async def serving(folder=None, **settings):
    """A running gateway and a client of it."""
    more: dict[str, Any] = {"state_dir": str(folder)} if folder is not None else {}
    async with running_gateway(**more, **settings) as running:
        yield running, running.client


async def begin(client, content, endpoint=CHATS, **fields):
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def until(client, batch, *statuses):
    while (batch := await client.batches.retrieve(batch.id)).status not in statuses:
        assert batch.status in ("validating", "in_progress", "finalizing", "cancelling"), batch
        await asyncio.sleep(0.02)
    return batch


async def lines_of(client, file_id):
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()] if file_id else []


async def test_from_file_to_file(running):
    client = running.client
    content = jsonl(*(request(f"r{index}") for index in range(5)), b"  ", request("bad", {**CHAT, "temperature": -1}))
    batch = await begin(client, content, metadata={"nightly": "yes"})
    assert batch.status == "validating"
    assert batch.expires_at == batch.created_at + 86400
    batch = await until(client, batch, "completed")
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    assert batch.model == "demo"
    assert batch.metadata == {"nightly": "yes"}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.usage.output_tokens == 30
    assert batch.usage.total_tokens == 30 + batch.usage.input_tokens
    answers = await lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"r{index}" for index in range(5)]
    alone = (await client.chat.completions.create(**CHAT)).choices[0].message.content
    for each in answers:
        assert each.keys() == {"id", "custom_id", "response", "error"}
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"][0]["message"]["content"] == alone
    (failed,) = await lines_of(client, batch.error_file_id)
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    output = await client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.bytes == len((await client.files.content(output.id)).content)
    assert running.idle


async def test_bad_batches_name_the_field():
    async with serving() as (running, client):
        file = await client.files.create(file=jsonl(request("a")), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({"input_file_id": "file-none"}, 404, "input_file_id"),
            ({"input_file_id": None}, 400, "input_file_id"),
            ({"endpoint": "/v1/models"}, 400, "endpoint"),
            ({"completion_window": "1h"}, 400, "completion_window"),
            ({"metadata": {"a": 1}}, 400, "metadata"),
            ({"metadata": {"a" * 65: "x"}}, 400, "metadata"),
            ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
            ({"model": "demo"}, 400, "model"),
        ]
        for change, status, param in cases:
            answer = await running.http.post("/v1/batches", json={**good, **change})
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        assert (await client.batches.list()).data == []
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call("batch_none")


BAD_LINES = [
    (b"{", "invalid_json_line", None),
    (b"[]", "invalid_json_line", None),
    (b"\xff", "invalid_json_line", None),
    ({"method": "POST", "url": CHATS, "body": CHAT}, "missing_required_parameter", "custom_id"),
    ({"custom_id": "a", "method": "POST", "url": CHATS}, "missing_required_parameter", "body"),
    (request(7), "invalid_type", "custom_id"),
    (request("a", body=[]), "invalid_type", "body"),
    (request(""), "invalid_value", "custom_id"),
    (request("x" * (LONGEST_ID + 1)), "invalid_value", "custom_id"),
    (request("good"), "duplicate_custom_id", "custom_id"),
    (request("a", method="GET"), "invalid_method", "method"),
    (request("a", url=TEXTS), "mismatched_url", "url"),
    (request("a", extra=1), "unknown_parameter", "extra"),
    (request("a", {**CHAT, "stream": True}), "invalid_value", "body.stream"),
    (request("a", {**CHAT, "user": "x" * (2 << 20)}), "line_too_long", None),
]


async def test_bad_lines_fail_the_batch_before_anything_is_carried_out(running, monkeypatch):
    monkeypatch.setattr("gateway.storage.batches.serving.MAX_BODY_BYTES", 1 << 20)
    client = running.client
    content = jsonl(request("good"), *(line for line, _, _ in BAD_LINES), request("last"))
    batch = await until(client, await begin(client, content), "failed")
    errors = [(each.line, each.code, each.param) for each in batch.errors.data]
    assert errors == [(number, code, param) for number, (_, code, param) in enumerate(BAD_LINES, 2)]
    assert all(each.message for each in batch.errors.data)
    assert batch.errors.object == "list"
    assert batch.failed_at
    assert batch.output_file_id is None
    empty = await until(client, await begin(client, b"\n"), "failed")
    assert [each.code for each in empty.errors.data] == ["empty_file"]
    monkeypatch.setattr("gateway.storage.batches.lines.MAX_LINES", 2)
    long = await until(client, await begin(client, jsonl(*(request(str(n)) for n in range(3)))), "failed")
    assert [each.code for each in long.errors.data] == ["too_many_tasks"]
    assert running.verifier.sequences == []


async def test_cancelling_keeps_what_is_answered(running):
    client = running.client

    async def some(verifier, sequence):
        await (count_up if len(verifier.sequences) <= 2 else silence)(verifier, sequence)

    running.verifier.behaviour = some
    batch = await begin(client, jsonl(*(request(f"r{index}") for index in range(20))))
    await eventually(lambda: len(running.verifier.sequences) >= 3)
    with pytest.raises(openai.ConflictError):
        await client.files.delete(batch.input_file_id)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    batch = await until(client, batch, "cancelled")
    assert batch.cancelling_at <= batch.cancelled_at
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 2, "failed": 18}
    assert len(await lines_of(client, batch.output_file_id)) == 2
    rest = await lines_of(client, batch.error_file_id)
    assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
    assert all(each["response"] is None for each in rest)
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    await eventually(lambda: running.idle)
    await client.files.delete(batch.input_file_id)


async def test_a_batch_expires(tmp_path):
    async with serving(tmp_path) as (running, client):
        running.verifier.behaviour = silence
        batch = await begin(client, jsonl(*(request(f"r{index}") for index in range(3))))
        await eventually(lambda: bool(running.verifier.sequences))
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db, db:
        # A day passes.
        db.execute("UPDATE batches SET body = json_set(CAST(body AS TEXT), '$.expires_at', 1) WHERE id = ?", (batch.id,))
    async with serving(tmp_path, verifiers=0) as (running, client):
        batch = await until(client, batch, "expired")
        assert batch.expired_at
        assert batch.output_file_id is None
        rest = await lines_of(client, batch.error_file_id)
        assert [each["error"]["code"] for each in rest] == ["batch_expired"] * 3
        await eventually(lambda: running.idle)


async def test_a_batch_that_cannot_go_on_holds_no_place_of_others_and_fails_without_its_input(tmp_path, monkeypatch):
    monkeypatch.setattr(batching, "BATCHES_AT_ONCE", 1)
    monkeypatch.setattr(batching, "TROUBLE_S", 0.05)
    async with serving(tmp_path) as (running, client):
        running.verifier.behaviour = silence
        batch = await begin(client, jsonl(request("a")))
        await eventually(lambda: bool(running.verifier.sequences))
        (file,) = (running.server.gateway.batches.folder / "files").iterdir()
    look = BatchStore.batch

    async def trouble(store, batch_id, *more):
        if batch_id == batch.id:
            raise OSError
        return await look(store, batch_id, *more)

    monkeypatch.setattr(BatchStore, "batch", trouble)
    async with serving(tmp_path) as (running, client):
        await until(client, await begin(client, jsonl(request("b"))), "completed")
        file.unlink()
        monkeypatch.setattr(BatchStore, "batch", look)
        batch = await until(client, batch, "failed")
        assert [each.code for each in batch.errors.data] == ["input_file_missing"]


async def test_the_next_gateway_goes_on(tmp_path):
    async def few(verifier, sequence):
        await (count_up if len(verifier.sequences) <= 4 else silence)(verifier, sequence)

    async with serving(tmp_path) as (running, client):
        running.verifier.behaviour = few
        batch = await begin(client, jsonl(*(request(f"r{index}") for index in range(12))))
        await eventually(lambda: len(running.verifier.sequences) > 4)
        while (now := await client.batches.retrieve(batch.id)).request_counts.completed < 4:
            await asyncio.sleep(0.02)
        assert now.status == "in_progress"
    async with serving(tmp_path) as (running, client):
        batch = await until(client, batch, "completed")
        done = [each["custom_id"] for each in await lines_of(client, batch.output_file_id)]
        assert done == [f"r{index}" for index in range(12)]
        assert len(running.verifier.sequences) == 8
        assert batch.request_counts.completed == 12


async def test_one_gateway_of_several_carries_out(tmp_path):
    async with serving(tmp_path) as (first, _), serving(tmp_path) as (second, client):
        batch = await begin(client, jsonl(*(request(f"r{index}") for index in range(4))))
        await until(client, batch, "completed")
        assert (len(first.verifier.sequences), len(second.verifier.sequences)) == (4, 0)
        first.verifier.behaviour = silence
        batch = await begin(client, jsonl(request("a")))
        await eventually(lambda: len(first.verifier.sequences) == 5)
        await client.batches.cancel(batch.id)
        await until(client, batch, "cancelled")


async def test_lines_that_the_fleet_cannot_serve_now_are_tried_again(monkeypatch):
    monkeypatch.setattr(batching, "RETRY_S", (0.01, 0.05))
    async with serving(queue_wait_s=0.1) as (running, client):
        running.verifier.behaviour = silence
        batch = await begin(client, jsonl(request("a")))
        await eventually(lambda: bool(running.verifier.sequences))
        running.directory.set_members([])
        running.verifier.hung = True
        (link,) = running.core.links.values()
        link.close()
        await eventually(lambda: not running.core.sequences)
        running.verifier.hung = False
        running.verifier.behaviour = count_up
        running.directory.set_members([running.verifier.member])
        assert (await until(client, batch, "completed")).request_counts.completed == 1


@pytest.mark.parametrize(("url", "body"), [(CHATS, CHAT), ("/v1/responses", RESPONSE)])
async def test_lines_that_a_pause_cuts_off_are_tried_again(running, monkeypatch, url, body):
    monkeypatch.setattr(batching, "RETRY_S", (0.01, 0.05))
    running.verifier.behaviour = silence
    batch = await begin(running.client, jsonl(request("a", body, url)), url)
    await eventually(lambda: bool(running.verifier.sequences))
    assert (await running.http.post("/pause")).status_code == 200
    running.verifier.behaviour = count_up
    assert (await running.http.post("/resume")).status_code == 200
    batch = await until(running.client, batch, "completed")
    assert batch.error_file_id is None
    (answer,) = await lines_of(running.client, batch.output_file_id)
    usage = answer["response"]["body"]["usage"]
    assert usage.get("output_tokens", usage.get("completion_tokens")) == batch.usage.output_tokens > 0


async def test_a_line_that_is_too_large_for_its_key_is_not_tried_again(tmp_path):
    keys = Keys(tmp_path)
    mine = keys.put("mine", tokens_per_minute=300)
    large = {**COMPLETION, "prompt": ["x" * 1000] * 2, "max_tokens": 1}
    async with serving(keys_file=str(keys.file), state_dir=str(tmp_path / "state")) as (_, client):
        client = client.with_options(api_key=mine["authorization"].removeprefix("Bearer "))
        batch = await begin(client, jsonl(request("a", large, TEXTS), request("b", COMPLETION, TEXTS)), TEXTS)
        batch = await until(client, batch, "completed")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (line,) = await lines_of(client, batch.error_file_id)
        assert (line["custom_id"], line["response"]["status_code"]) == ("a", 429)


async def test_people_go_first_and_batches_take_no_places_of_theirs(monkeypatch):
    monkeypatch.setattr("gateway.storage.batches.pace.room", lambda _, quiet, *others: 3 if quiet else 1)
    monkeypatch.setattr("gateway.storage.batches.pace.QUIET_AFTER_S", 1e9)
    async with serving(max_in_flight=1) as (running, client):
        running.verifier.behaviour = silence
        batch = await begin(client, jsonl(*(request(f"r{index}") for index in range(8))))
        await eventually(lambda: bool(running.core.sequences.batched))
        await eventually(lambda: running.core.sequences.batched == 3 == len(running.verifier.sequences))
        running.verifier.behaviour = count_up
        talk = await client.chat.completions.create(**CHAT)
        assert talk.choices[0].finish_reason == "length"
        assert running.core.sequences.held == 2
        for state, count in (("running", 1), ("held", 2)):
            assert await running.metric("outrider_batch_sequences", state=state) == count
        await eventually(lambda: sum(each.aborted.is_set() for each in running.verifier.sequences) == 2)
        monkeypatch.setattr("gateway.storage.batches.pace.QUIET_AFTER_S", 0)
        await eventually(lambda: sum("~2" in each.request_id for each in running.verifier.sequences) == 2)
        for each in running.verifier.sequences[:3]:
            if not each.aborted.is_set():
                asyncio.create_task(count_up(running.verifier, each))  # noqa: RUF006
        batch = await until(client, batch, "completed")
        assert batch.request_counts.completed == 8


async def test_keys_of_batches_go_last_without_a_folder_too(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.storage.batches.pace.room", lambda *_: 1)
    keys = Keys(tmp_path)
    nightly, other = keys.put("nightly", priority="batch"), keys.put("other")
    async with serving("none", keys_file=str(keys.file)) as (running, _):
        running.verifier.behaviour = silence
        for _ in range(3):
            running.begin(CHATS, nightly)
        await eventually(lambda: running.core.sequences.held == 2)
        running.verifier.behaviour = count_up
        assert (await running.http.post(CHATS, json=CHAT, headers=other)).status_code == 200


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


async def test_all_uploads_together_are_bounded(running, monkeypatch):
    monkeypatch.setattr("gateway.routes.files.MAX_UPLOADING_BYTES", 100_000)
    with pytest.raises(openai.RateLimitError, match="uploaded at once"):
        await running.client.files.create(file=b"x" * 200_000, purpose="batch")
    assert (await running.client.files.create(file=b"x" * 50_000, purpose="batch")).bytes == 50_000
    assert running.server.gateway.uploading_bytes == 0


async def test_bad_uploads_name_the_field(running, monkeypatch):
    monkeypatch.setattr("gateway.routes.files.MAX_FILE_BYTES", 1000)
    form, file = {"purpose": "batch"}, {"file": ("a", b"x")}
    hour = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}
    folder = running.server.gateway.batches.folder / "files"
    before = [*folder.iterdir()]
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
    assert [*folder.iterdir()] == before


async def test_a_full_store_says_so():
    async with serving(state_mib=1) as (_, client):
        kept = await client.files.create(file=b"x" * 700_000, purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=b"x" * 700_000, purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
        await client.files.delete(kept.id)
        await client.files.create(file=b"x" * 700_000, purpose="batch")
