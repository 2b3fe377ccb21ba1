"""A gateway before real verifiers: what requests ask of speculation is done and told, and changes no token; streams outlive
a verifier that is killed; a model embeds."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import msgspec
import pytest

from tests.chaos.workload import Case, Outcome, ask, cases, what_is_wrong
from tests.support.engine_gateway import EngineFleet, engine_fleet
from tests.support.fake_verifier import eventually
from tests.support.processes import Verifier
from tests.support.running_gateway import CHAT, refusal

pytestmark = pytest.mark.engine

CASES = [case for case in cases(160)[:11] if case.exact]
"""One of each kind of request that has one right answer."""


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[EngineFleet]:
    args = {"engine_args": {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}}
    with mock.patch("gateway.fleet.core.POISON_AFTER", 5):
        async with engine_fleet(verifiers=3, mode="auto", verifier=args) as running:
            yield running


TOKENS, K = 96, 8
PROMPT = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n" * 12
"""Longer than a block of the KV cache, so that it is found there."""
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}


async def only_at(running: EngineFleet, *serving: Verifier) -> None:
    """The other verifiers get no new requests."""
    states = {each.name: "ready" if each in serving else "draining" for each in running.verifiers}
    members = running.directory.members
    running.directory.set_members([msgspec.structs.replace(each, state=states[each.id]) for each in members])
    await eventually(lambda: {link.member.id for link in running.core.routable_links()} == {each.name for each in serving})


async def accounted(running: EngineFleet, options: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Text, what speculation did, and usage."""
    response = await running.http.post(
        "/v1/completions", json=BODY | {"outrider": {"stats": True, "learn": False, **options}} | fields
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    (account,) = answer["outrider"]["choices"]
    return answer["choices"][0]["text"], account, answer["usage"]


async def test_options_are_met_and_change_no_token(running: EngineFleet) -> None:
    await only_at(running, running.verifiers[0])
    text, off, usage = await accounted(running, {"mode": "off"})

    async def same(options: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found, *others = await accounted(running, options, **fields)
        assert found == text
        return others[0], others[1]

    assert (off["verifications"], off["drafted"], off["sources"]) == (TOKENS, 0, [])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    # How much of a draft is verified follows from what steps take, and that from what else the machine does.
    for _ in range(3):
        predicted, usage = await same({}, prediction={"type": "content", "content": text})
        if predicted["verifications"] < TOKENS / 2:
            break
    assert predicted["verifications"] < TOKENS / 2
    details = usage["completion_tokens_details"]
    by_prediction = [each for each in predicted["sources"] if each["source"] == "prediction"]
    assert details["accepted_prediction_tokens"] == sum(each["accepted"] for each in by_prediction) > TOKENS / 2
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0

    fresh, _ = await same({"mode": "sync"})
    assert {each["source"] for each in fresh["sources"]} <= {"fresh", "lookup"}
    assert "drafter-0" in {each["drafter"] for each in fresh["sources"]}

    ahead, _ = await same({"mode": "ahead"})

    for account in (predicted, fresh, ahead):
        assert account["rule"] == "shared_noise"
        assert account["tokens"] == TOKENS
        assert account["unaccounted_tokens"] == 0
        assert account["accepted"] == sum(n * count for n, count in enumerate(account["accepted_lengths"]))
        # The last verification may accept more than was asked for.
        assert TOKENS <= account["verifications"] + account["accepted"] <= TOKENS + K

    for fields, rule in (({"seed": None}, "rejection_sampling"), ({"temperature": 0}, "greedy")):
        _, account, _ = await accounted(running, {}, max_tokens=1, **fields)
        assert account["rule"] == rule

    # By a stop string the gateway ends the sequence, and the verifier tells all the same.
    _, stopped, _ = await accounted(running, {}, stop=[text[40:44]])
    assert 0 < stopped["verifications"] <= TOKENS
    assert stopped["unaccounted_tokens"] == 0
    await running.quiet()


async def test_what_a_request_generated_drafts_for_the_next_one_at_another_verifier(running: EngineFleet) -> None:
    first, second, _ = running.verifiers
    # What the test above generated drafts for nobody here.
    sync, apart = {"mode": "sync"}, {"cache_salt": "apart"}
    await only_at(running, first)
    text, account, _ = await accounted(running, sync | {"learn": True}, **apart)
    assert "shared" not in {each["source"] for each in account["sources"]}
    await accounted(running, sync, **apart, seed=6)
    await only_at(running, second)
    _, alone, _ = await accounted(running, sync | {"learn": True}, **apart, seed=6)
    assert not [each for each in alone["sources"] if each["source"] == "shared" and each["accepted"] > TOKENS / 4]
    same, shared, _ = await accounted(running, sync | {"learn": True}, **apart)
    assert same == text
    assert sum(each["accepted"] for each in shared["sources"] if each["source"] == "shared") > TOKENS / 4
    _, opted_out, _ = await accounted(running, sync, **apart)
    assert "shared" not in {each["source"] for each in opted_out["sources"]}
    await running.quiet()


async def outcome_of(running: EngineFleet, case: Case) -> Outcome:
    outcome = Outcome(case)
    await ask(running.http, outcome)
    return outcome


async def test_a_killed_verifier_is_not_noticed(running: EngineFleet) -> None:
    """Every case at once, when most sequences are under way."""
    await only_at(running, *running.verifiers)
    expected = [await outcome_of(running, case) for case in CASES]
    assert not any(each.errors for each in expected)
    tasks = [asyncio.create_task(outcome_of(running, case)) for case in CASES]
    await eventually(lambda: sum(len(record.emitted) > 8 for record in running.core.sequences) >= 4)
    busy = next(record.link.member for record in running.core.sequences if record.link is not None)
    os.kill(busy.pid, signal.SIGKILL)
    for found, wanted in zip(await asyncio.gather(*tasks), expected, strict=True):
        assert what_is_wrong(found, wanted) is None, found
    assert await running.metric("outrider_failovers_total") >= 1
    await running.quiet()


async def test_texts_are_embedded_scored_and_ranked():
    async with engine_fleet(
        verifiers=1, mode="off", verifier={"engine_args": {"runner": "pooling", "convert": "embed"}}
    ) as fleet:
        made = await fleet.client.embeddings.create(model="demo", input=["def f(x):", "def f(x):", "import os"])
        first, again, other = (each.embedding for each in made.data)
        assert len(first) == 256
        assert math.isclose(math.hypot(*first), 1, rel_tol=1e-3)
        assert first == pytest.approx(again, abs=1e-5)
        assert first != pytest.approx(other, abs=1e-2)
        assert made.usage.prompt_tokens > 0
        body = {"model": "demo", "query": "import os", "documents": ["def f(x):", "import os", "return 1"]}
        ranked = (await fleet.http.post("/v1/rerank", json=body)).json()["results"]
        assert ranked[0]["index"] == 1
        pair = {"model": "demo", "text_1": "import os", "text_2": "import os"}
        assert (await fleet.http.post("/v1/score", json=pair)).json()["data"][0]["score"] == pytest.approx(1, abs=1e-3)
        assert refusal(await fleet.http.post("/v1/chat/completions", json=CHAT)) == (400, "model")
        wrong = await fleet.http.post("/v1/embeddings", json={"model": "nope", "input": "x"})
        assert wrong.status_code == 404
        for path in ("/abort_requests", "/pause"):
            await fleet.http.post("/pause?mode=keep")
            embedding = asyncio.create_task(fleet.http.post("/v1/embeddings", json={"model": "demo", "input": ["a", "b"]}))
            await eventually(lambda: len(fleet.core.sequences) == 2)
            await fleet.http.post(path, json={})
            assert refusal(await embedding) == (503, "aborted")
            await fleet.http.post("/resume")
            assert len((await fleet.client.embeddings.create(model="demo", input="def f(x):")).data[0].embedding) == 256
        await fleet.quiet()
