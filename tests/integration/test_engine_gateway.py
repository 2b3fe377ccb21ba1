"""A gateway before real verifiers: what requests ask of speculation is done and told, and changes no token; streams outlive
their verifier, whether it is killed, stopped, or relieved of its work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest

from tests.integration.test_gateway_streams import events
from tests.support.engine_gateway import EngineFleet, engine_fleet
from tests.support.fake_verifier import eventually
from tests.support.processes import Verifier

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
        async with engine_fleet(verifiers=3, drafters=1, mode="auto", verifier=args) as running:
            yield running


TOKENS, K = 96, 8
PROMPT = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n" * 12
"""Longer than a block of the KV cache, so that it is found there."""
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}


async def only_at(fleet: EngineFleet, *serving: Verifier) -> None:
    fleet.route_only_to(*serving)
    await eventually(lambda: {link.member.id for link in fleet.core.routable()} == {each.name for each in serving})


async def accounted(fleet: EngineFleet, options: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Text, what speculation did, and usage."""
    response = await fleet.http.post(
        "/v1/completions", json=BODY | {"outrider": {"stats": True, "learn": False, **options}} | fields
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    (told,) = answer["outrider"]["choices"]
    return answer["choices"][0]["text"], told, answer["usage"]


async def test_wishes_are_met_and_change_no_token(fleet: EngineFleet) -> None:
    await only_at(fleet, fleet.verifiers[0])
    text, off, usage = await accounted(fleet, {"mode": "off"})
    assert (off["verifications"], off["drafted"], off["sources"]) == (TOKENS, 0, [])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    # How much of a draft is verified follows from what steps take, and that from what else the machine does.
    for _ in range(3):
        same, predicted, usage = await accounted(fleet, {}, prediction={"type": "content", "content": text})
        assert same == text
        if predicted["verifications"] < TOKENS / 2:
            break
    assert predicted["verifications"] < TOKENS / 2
    details = usage["completion_tokens_details"]
    by_prediction = [each for each in predicted["sources"] if each["source"] == "prediction"]
    assert details["accepted_prediction_tokens"] == sum(each["accepted"] for each in by_prediction) > TOKENS / 2
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0

    same, wrong, usage = await accounted(fleet, {}, prediction={"type": "content", "content": "no such words " * 40})
    assert same == text
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] < TOKENS / 4

    same, fresh, _ = await accounted(fleet, {"mode": "sync"})
    assert same == text
    assert {each["source"] for each in fresh["sources"]} <= {"fresh", "lookup"}
    assert "drafter-0" in {each["drafter"] for each in fresh["sources"]}

    same, ahead, _ = await accounted(fleet, {"mode": "ahead"})
    assert same == text

    same, short, _ = await accounted(fleet, {"mode": "sync", "num_speculative_tokens": 1})
    assert same == text
    assert len(short["accepted_lengths"]) <= 2
    assert short["drafted"] == sum(short["accepted_lengths"])

    for told in (predicted, wrong, fresh, ahead, short):
        assert told["rule"] == "shared_noise"
        assert told["tokens"] == TOKENS
        assert told["unaccounted_tokens"] == 0
        assert told["accepted"] == sum(n * count for n, count in enumerate(told["accepted_lengths"]))
        # The last verification may accept more than was asked for.
        assert TOKENS <= told["verifications"] + told["accepted"] <= TOKENS + K

    # What a request generated drafts for the next one, where neither has opted out.
    for _ in range(5):
        same, shared, _ = await accounted(fleet, {"mode": "sync", "learn": True})
        assert same == text
        accepted = sum(each["accepted"] for each in shared["sources"] if each["source"] == "shared")
        if accepted > TOKENS / 2:
            break
    assert accepted > TOKENS / 2
    same, alone, _ = await accounted(fleet, {"mode": "sync"})
    assert same == text
    assert "shared" not in {each["source"] for each in alone["sources"]}

    for asked, rule in (({"seed": None}, "rejection_sampling"), ({"temperature": 0}, "greedy")):
        _, told, _ = await accounted(fleet, {}, max_tokens=1, **asked)
        assert told["rule"] == rule

    # By a stop string the gateway ends the sequence, and the verifier tells all the same.
    _, stopped, _ = await accounted(fleet, {}, stop=[text[40:44]])
    assert 0 < stopped["verifications"] <= TOKENS
    assert stopped["unaccounted_tokens"] == 0

    streamed = await fleet.http.post("/v1/completions", json=BODY | {"stream": True, "outrider": {"stats": True}})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == text
    assert chunks[-1]["outrider"]["choices"][0]["tokens"] == TOKENS
    await fleet.quiet()


async def test_what_a_request_generated_drafts_for_the_next_one_at_another_verifier(fleet: EngineFleet) -> None:
    first, second, _ = fleet.verifiers
    # What the test above generated drafts for nobody here.
    sync, apart = {"mode": "sync"}, {"cache_salt": "apart"}
    await only_at(fleet, first)
    text, told, _ = await accounted(fleet, sync | {"learn": True}, **apart)
    assert "shared" not in {each["source"] for each in told["sources"]}
    await accounted(fleet, sync, **apart, seed=6)
    await only_at(fleet, second)
    _, alone, _ = await accounted(fleet, sync | {"learn": True}, **apart, seed=6)
    assert not [each for each in alone["sources"] if each["source"] == "shared" and each["accepted"] > TOKENS / 4]
    same, shared, _ = await accounted(fleet, sync | {"learn": True}, **apart)
    assert same == text
    assert sum(each["accepted"] for each in shared["sources"] if each["source"] == "shared") > TOKENS / 4
    await fleet.quiet()


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
    await only_at(fleet, *fleet.verifiers)
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
