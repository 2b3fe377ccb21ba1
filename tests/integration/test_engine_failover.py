"""Streams outlive their verifier: a gateway before real verifiers, one of which is killed, stopped, or relieved of its work."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest

from tests.integration.test_gateway_streams import events
from tests.support.engine_gateway import EngineFleet, engine_fleet
from tests.support.fake_verifier import eventually

pytestmark = pytest.mark.engine

SCHEMA = {"type": "object", "properties": {"x": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 20, "maxItems": 20}}}
BASE = {"model": "demo", "temperature": 0, "max_tokens": 160, "stream": True, "stream_options": {"include_usage": True}}
BODIES: list[dict[str, Any]] = [
    {**BASE, "prompt": "def add(a, b):\n", "ignore_eos": True},
    {**BASE, "prompt": "class Stack:\n", "ignore_eos": True, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {**BASE, "prompt": "import os\n", "ignore_eos": True, "logprobs": 2, "max_tokens": 80},
    {**BASE, "prompt": "x = ", "structured_outputs": {"json": SCHEMA}},
    {**BASE, "prompt": "for i in range(", "ignore_eos": True, "temperature": 1.0, "seed": 5, "n": 3},
    {**BASE, "prompt": "def fib(n):\n", "ignore_eos": True, "stop": ["return fib", "\n\n\n\n"]},
    {**BASE, "prompt": "while True:\n", "ignore_eos": True, "temperature": 0.7, "seed": 6, "top_p": 0.9},
]


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[EngineFleet]:
    args = {"engine_args": {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}}
    with mock.patch("gateway.fleet.core.POISON_AFTER", 5):
        async with engine_fleet(verifiers=3, drafters=1, verifier=args) as running:
            yield running


def told(content: bytes) -> list[Any]:
    """What a client is told, however it is cut into chunks."""
    chunks = events(content)
    said: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", [])):
        mine = said.setdefault(choice["index"], {"text": "", "finish": [], "tokens": [], "logprobs": []})
        mine["text"] += choice["text"]
        mine["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        mine["tokens"] += (choice.get("logprobs") or {}).get("tokens", [])
        mine["logprobs"] += [round(each, 2) for each in (choice.get("logprobs") or {}).get("token_logprobs", [])]
    return [chunks[-1].get("usage"), [chunk["error"] for chunk in chunks if "error" in chunk], said]


async def ask(fleet: EngineFleet, body: dict[str, Any]) -> list[Any]:
    answer = await fleet.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return told(answer.content)


@pytest.fixture(scope="module")
async def expected(fleet: EngineFleet) -> list[list[Any]]:
    return [await ask(fleet, body) for body in BODIES]


async def all_at_once(fleet: EngineFleet) -> list[asyncio.Task[list[Any]]]:
    """Every body at once; returns when most sequences are under way."""
    tasks = [asyncio.create_task(ask(fleet, body)) for body in BODIES]
    await eventually(lambda: sum(len(record.emitted) > 8 for record in fleet.core.sequences) >= 4, 30)
    return tasks


async def test_a_migration_is_not_noticed(fleet: EngineFleet, expected: list[list[Any]]) -> None:
    tasks = await all_at_once(fleet)
    before = {record.request.request_id: record.link for record in fleet.core.sequences}
    assert fleet.core.migrate(list(fleet.core.sequences), None, "test") >= 4
    assert all(record.link is not before[record.request.request_id] for record in fleet.core.sequences if record.places > 1)
    assert await asyncio.gather(*tasks) == expected
    await fleet.quiet()


async def test_a_stopped_verifier_is_given_up_and_later_cleans_up(fleet: EngineFleet, expected: list[list[Any]]) -> None:
    tasks = await all_at_once(fleet)
    busy = next(record.link.member for record in fleet.core.sequences if record.link is not None)
    os.kill(busy.pid, signal.SIGSTOP)
    try:
        # The connection's own heartbeat notices, in five seconds.
        assert await asyncio.gather(*tasks) == expected
    finally:
        os.kill(busy.pid, signal.SIGCONT)
    await eventually(lambda: len(fleet.core.ready_links) == 3, 30)
    await fleet.quiet()


async def test_a_killed_verifier_is_not_noticed(fleet: EngineFleet, expected: list[list[Any]]) -> None:
    tasks = await all_at_once(fleet)
    busy = next(record.link.member for record in fleet.core.sequences if record.link is not None)
    os.kill(busy.pid, signal.SIGKILL)
    assert await asyncio.gather(*tasks) == expected
    assert await fleet.metric("outrider_failovers_total") >= 1
    await fleet.quiet()
