"""Background responses: what another gateway's process shows of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic

from gateway.admission.claim import Claim
from gateway.responses.serving import Responses
from gateway.responses.store import Kept, Store


class Made(pydantic.BaseModel, extra="allow"):
    type: str
    sequence_number: int


async def made() -> AsyncGenerator[Made, None]:
    names = ("response.created", "response.in_progress", "response.output_text.delta", "response.completed")
    for number, name in enumerate(names):
        status = {} if "delta" in name else {"response": {"status": name.rpartition(".")[2], "output": []}}
        yield Made(type=name, sequence_number=number, **status)


async def test_a_follower_in_another_process_gets_the_last_event_however_late_it_looks(tmp_path: Path) -> None:
    opened = [Store(tmp_path / "responses.sqlite", 1 << 30) for _ in range(2)]
    ours, other = (Responses(store, 4096) for store in opened)
    followed: list[list[str]] = []
    put = opened[0].put

    async def put_and_look(kept: Kept, *events: Any) -> None:
        await put(kept, *events)
        if kept.body["status"] == "completed":
            followed.append([each async for each in other.follow("r", -1)])

    opened[0].put = put_and_look  # type: ignore[method-assign, assignment]
    turn: Any = SimpleNamespace(
        id="r", shown=dict, kept=lambda body: Kept("r", "me", None, [], body), inquiry=None, conversation=None, store=True
    )
    claim = Claim()
    await ours.begin(turn, made(), "m", 0, claim)
    claim.close()
    assert not claim.closed, "only its HTTP request has ended"
    await asyncio.gather(*ours._tasks.values())
    assert claim.closed
    assert len(followed[0]) == 4
    assert "response.completed" in followed[0][-1]
    await ours.close()
    await other.close()
