"""Pauses that are asked for at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.fleet.pauses import Changes, Pauses
from gateway.http.errors import NotSupported
from gateway.routes import weights


def test_refused_pauses_are_undone_alone() -> None:
    changes = Changes()
    first, now = changes.begin(Pauses(), None, True)
    second, now = changes.begin(now, "a", True)
    third, now = changes.begin(now, "b", True)
    now = changes.end(second, now, refused=False)
    now = changes.end(third, now, refused=True)
    now = changes.end(first, now, refused=True)
    assert now == Pauses().after("a", True)
    assert changes._changes == []


async def test_a_pause_outlives_a_refused_one_that_was_asked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    core = SimpleNamespace(pauses=Pauses(), pausing=Changes(), standing=set(), ready_links=[])
    gateway: Any = SimpleNamespace(client=SimpleNamespace(core=core), peers=None)
    asked, refuse = asyncio.Event(), asyncio.Event()

    async def results(_: Any, verifier: str | None, *__: Any) -> dict[str, Any]:
        if verifier == "a":
            asked.set()
            await refuse.wait()
            raise NotSupported("Not here.")
        return {"b": True}

    monkeypatch.setattr(weights, "_results", results)
    refused = asyncio.create_task(weights._hold(gateway, "a", True, "sleep"))
    await asked.wait()
    await weights._hold(gateway, "b", True, "sleep")
    refuse.set()
    with pytest.raises(NotSupported):
        await refused
    assert cast(Pauses, core.pauses) == Pauses().after("b", True)
