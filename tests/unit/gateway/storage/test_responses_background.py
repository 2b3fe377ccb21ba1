"""Background responses: what another gateway's process shows of them."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from gateway.admission.claim import Claim
from gateway.auth.caller import Caller
from gateway.http.errors import RateLimited
from gateway.storage.responses import serving
from gateway.storage.responses.serving import ResponseService
from gateway.storage.responses.store import ResponseStore, StoredResponse
from tests.support.fake_verifier import eventually


class Made(pydantic.BaseModel, extra="allow"):
    type: str
    sequence_number: int


async def made() -> AsyncGenerator[Made, None]:
    names = ("response.created", "response.in_progress", "response.output_text.delta", "response.completed")
    for number, name in enumerate(names):
        status = {} if "delta" in name else {"response": {"status": name.rpartition(".")[2], "output": []}}
        yield Made(type=name, sequence_number=number, **status)


def turn(name: str, owner: str) -> Any:
    def stored_response(body: dict[str, Any]) -> StoredResponse:
        return StoredResponse(name, owner, None, [], body)

    return SimpleNamespace(
        id=name, owner=owner, shown=dict, stored_response=stored_response, speculation=None, conversation=None, background=True
    )


async def ended(*claims: Claim) -> None:
    """Waits for background responses, after the HTTP requests that began them have ended."""
    for claim in claims:
        claim.close()
    await eventually(lambda: all(claim.closed for claim in claims))


async def test_a_follower_in_another_process_gets_the_last_event_however_late_it_looks(tmp_path: Path) -> None:
    opened = [ResponseStore(tmp_path / "responses.sqlite", 1 << 30) for _ in range(2)]
    ours, other = (ResponseService(store, 4096) for store in opened)
    followed: list[list[str]] = []
    advance = opened[0].advance

    async def advance_and_look(kept: StoredResponse, *events: Any) -> bool:
        goes_on = await advance(kept, *events)
        if kept.body["status"] == "completed":
            followed.append([each async for each in other.follow("r", -1)])
        return goes_on

    opened[0].advance = advance_and_look  # type: ignore[method-assign, assignment]
    claim = Claim()
    await ours.begin(turn("r", "me"), made(), "m", 0, claim)
    claim.close()
    assert not claim.closed, "only its HTTP request has ended"
    await eventually(lambda: claim.closed)
    assert len(followed[0]) == 4
    assert "response.completed" in followed[0][-1]
    await ours.close()
    await other.close()


async def test_a_key_has_its_share_of_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BACKGROUND_QUEUED", 8)
    responses, numbers = ResponseService(ResponseStore(tmp_path / "responses.sqlite", 1 << 30), 4096), count()
    gate = asyncio.Event()
    taken: list[Claim] = []

    async def held() -> AsyncGenerator[Made, None]:
        await gate.wait()
        async for each in made():
            yield each

    async def begun(owner: str, most: int | None = None) -> int:
        """How many of a burst are taken."""
        claims = [Claim(Caller(owner, owner, concurrent_requests=most)) for _ in range(8)]
        burst = (responses.begin(turn(f"r{next(numbers)}", owner), held(), "m", 0, claim) for claim in claims)
        done = await asyncio.gather(*burst, return_exceptions=True)
        assert all(isinstance(each, dict | RateLimited) for each in done)
        taken.extend(claim for claim, each in zip(claims, done, strict=True) if isinstance(each, dict))
        return sum(isinstance(each, dict) for each in done)

    assert await begun("limited", 1) == 1
    assert await begun("greedy") == 4
    assert await begun("other") == 2
    gate.set()
    await ended(*taken)
    assert await begun("limited", 1) == 1
    await responses.close()


async def test_what_was_cancelled_elsewhere_adds_nothing_to_its_conversation(tmp_path: Path) -> None:
    ours, theirs = (ResponseStore(tmp_path / "responses.sqlite", 1 << 30) for _ in range(2))
    await ours.create_conversation("c", "me", {}, [])
    begun = turn("r", "me")
    begun.conversation, begun.input = "c", [{"id": "msg_1"}]

    async def cancelled() -> AsyncGenerator[Made, None]:
        async for each in made():
            if each.type == "response.completed":
                assert await theirs.advance(begun.stored_response({"status": "cancelled", "output": []}))
            yield each

    responses = ResponseService(ours, 4096)
    claim = Claim()
    await responses.begin(begun, cancelled(), "m", 0, claim)
    await ended(claim)
    assert (await ours.get("r", "me")).body["status"] == "cancelled"
    assert await ours.items("c", "me") == []
    await responses.close()
    theirs.close()


async def test_what_cannot_be_stored_has_failed_once_the_store_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TROUBLE_S", 0.01)
    store = ResponseStore(tmp_path / "responses.sqlite", 1 << 30)
    responses, advance, refused = ResponseService(store, 4096), store.advance, count()

    async def full(kept: StoredResponse, *events: Any) -> bool:
        if kept.body["status"] in ("completed", "failed") and next(refused) < 3:
            raise sqlite3.OperationalError("database or disk is full")
        return await advance(kept, *events)

    monkeypatch.setattr(store, "advance", full)
    claim = Claim()
    await responses.begin(turn("r", "me"), made(), "m", 0, claim)
    await ended(claim)
    assert (await store.get("r", "me")).body["status"] == "failed"
    await responses.close()


async def test_a_follower_is_told_that_the_conversation_is_gone(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "responses.sqlite", 1 << 30)
    responses = ResponseService(store, 4096)
    await store.create_conversation("c", "me", {}, [])
    begun = turn("r", "me")
    begun.conversation, begun.input = "c", []

    async def deleted() -> AsyncGenerator[Made, None]:
        async for each in made():
            if each.type == "response.completed":
                await store.delete_conversation("c", "me")
            yield each

    claim = Claim()
    await responses.begin(begun, deleted(), "m", 0, claim)
    await ended(claim)
    followed = [json.loads(each) async for each in responses.follow("r", -1)]
    assert [each["type"] for each in followed if each["type"] in serving.LAST] == ["response.failed"]
    assert followed[-1]["response"]["status"] == (await store.get("r", "me")).body["status"] == "failed"
    await responses.close()
