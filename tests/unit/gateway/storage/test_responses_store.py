"""What is kept of responses and conversations: for how long, and what of makers that are gone."""

import pytest

from gateway.http.errors import BadRequest, NotFound
from gateway.requests.limits import MAX_ITEMS
from gateway.storage.responses.store import INTERRUPTED, LIFETIME_S, ResponseStore, StoredResponse

DAY = 86400.0


@pytest.fixture
def now(monkeypatch):
    at = [1e9]
    monkeypatch.setattr("gateway.storage.responses.store.time.time", lambda: at[0])
    return at


@pytest.fixture
def store(tmp_path):
    opened = ResponseStore(tmp_path / "responses.sqlite", 1 << 30)
    yield opened
    opened.close()


def kept(name: str, status: str = "completed") -> StoredResponse:
    return StoredResponse(name, "me", None, [], {"id": name, "status": status, "output": []})


def items(count: int, first: int = 0) -> list[dict]:
    return [{"id": f"msg_{first + index}"} for index in range(count)]


async def test_a_conversation_lives_as_long_as_its_owner_uses_it(store, now):
    for name in ("used", "unused"):
        await store.create_conversation(name, "me", {}, [])
    for day in range(60):
        now[0] += DAY
        await store.items("used", "me")
        with pytest.raises(NotFound):
            await store.conversation("unused", "other")
        await store.put(kept(f"r{day}"))
    assert (await store.conversation("used", "me"))["created_at"] == 1e9
    with pytest.raises(NotFound):
        await store.conversation("unused", "me")
    now[0] += LIFETIME_S
    await store.put(kept("s"))
    with pytest.raises(NotFound):
        await store.conversation("used", "me")


async def test_what_every_continuation_would_read_is_bounded_and_nothing_is_lost(store, monkeypatch):
    """Of a conversation, and of all responses before one."""
    await store.create_conversation("full", "me", {}, items(MAX_ITEMS - 1))
    monkeypatch.setattr("gateway.storage.responses.store.MAX_HISTORY_BYTES", 1000)
    await store.create_conversation("large", "me", {}, [{"id": "a", "text": "x" * 700}])
    for name, more, message, length in (
        ("full", items(2, 5000), "2049 items", MAX_ITEMS - 1),
        ("large", [{"id": "b", "text": "x" * 700}], "1000 are the most", 1),
    ):
        with pytest.raises(BadRequest, match=message) as caught:
            await store.add_items(name, "me", more)
        assert (caught.value.param, caught.value.code) == ("items", "conversation_full")
        assert len(await store.items(name, "me")) == length
    for name, previous in (("r1", None), ("r2", "r1"), ("r3", "r2")):
        body = {"id": name, "status": "completed", "output": []}
        await store.put(StoredResponse(name, "me", previous, [{"id": name, "text": "x" * 350}], body))
    assert len(await store.history("r2", "me")) == 2
    with pytest.raises(BadRequest, match="larger than 1000 bytes") as caught:
        await store.history("r3", "me")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "conversation_full")
    monkeypatch.undo()
    await store.add_items("full", "me", items(1, 5000))
    await store.add_items("full", "me", items(3, 6000), most=None)
    assert len(await store.items("full", "me")) == MAX_ITEMS + 3


async def test_a_response_has_failed_when_its_maker_has_ended_whatever_its_pid(store, tmp_path):
    theirs = ResponseStore(tmp_path / "responses.sqlite", 1 << 30)
    await theirs.put(kept("theirs", "in_progress"))
    await store.put(kept("ours", "in_progress"))
    for name in ("theirs", "ours"):
        assert await store.unfinished(name)
        assert (await store.get(name, "me")).body["status"] == "in_progress"
    theirs.close()
    assert not await store.unfinished("theirs")
    body = (await store.get("theirs", "me")).body
    assert (body["status"], body["error"]) == ("failed", INTERRUPTED)
    assert await store.unfinished("ours")


async def test_what_another_gateway_has_ended_does_not_go_on(store, tmp_path):
    theirs = ResponseStore(tmp_path / "responses.sqlite", 1 << 30)
    for name in ("cancelled", "deleted"):
        await theirs.put(kept(name, "queued"))
        assert await theirs.advance(kept(name, "in_progress"))
        assert await theirs.add_events(name, [(0, "{}")])
    assert await store.advance(kept("cancelled", "cancelled"))
    await store.delete("deleted", "me")
    for name in ("cancelled", "deleted"):
        assert not await theirs.add_events(name, [(1, "{}")])
        assert not await theirs.advance(kept(name), [(2, "{}")])
    assert (await theirs.get("cancelled", "me")).body["status"] == "cancelled"
    assert [number for number, _ in await theirs.events("cancelled", -1)] == [0]
    with pytest.raises(NotFound):
        await theirs.get("deleted", "me")
    theirs.close()
