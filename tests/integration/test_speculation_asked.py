"""What requests ask of speculation, on a real engine with a drafter: it is done, it is told, and it changes no token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.engine_gateway import EngineFleet, engine_fleet
from tests.support.fake_verifier import eventually
from tests.support.processes import Verifier

pytestmark = pytest.mark.engine

TOKENS, K = 96, 8
PROMPT = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n" * 12
"""Longer than a block of the KV cache, so that it is found there."""
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}


async def ask(fleet: EngineFleet, options: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Text, what speculation did, and usage."""
    response = await fleet.http.post(
        "/v1/completions", json=BODY | {"outrider": {"stats": True, "learn": False, **options}} | fields
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    (told,) = answer["outrider"]["choices"]
    return answer["choices"][0]["text"], told, answer["usage"]


async def test_wishes_are_met_and_change_no_token() -> None:
    async with engine_fleet(verifiers=1, drafters=1, mode="auto") as fleet:
        text, off, usage = await ask(fleet, {"mode": "off"})
        assert (off["verifications"], off["drafted"], off["sources"]) == (TOKENS, 0, [])
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

        # How much of a draft is verified follows from what steps take, and that from what else the machine does.
        for _ in range(3):
            same, predicted, usage = await ask(fleet, {}, prediction={"type": "content", "content": text})
            assert same == text
            if predicted["verifications"] < TOKENS / 2:
                break
        assert predicted["verifications"] < TOKENS / 2
        details = usage["completion_tokens_details"]
        by_prediction = [each for each in predicted["sources"] if each["source"] == "prediction"]
        assert details["accepted_prediction_tokens"] == sum(each["accepted"] for each in by_prediction) > TOKENS / 2
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0

        same, wrong, usage = await ask(fleet, {}, prediction={"type": "content", "content": "no such words " * 40})
        assert same == text
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] < TOKENS / 4

        same, fresh, _ = await ask(fleet, {"mode": "sync"})
        assert same == text
        assert {each["source"] for each in fresh["sources"]} <= {"fresh", "lookup"}
        assert "drafter-0" in {each["drafter"] for each in fresh["sources"]}

        same, ahead, _ = await ask(fleet, {"mode": "ahead"})
        assert same == text

        same, short, _ = await ask(fleet, {"mode": "sync", "num_speculative_tokens": 1})
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
            same, shared, _ = await ask(fleet, {"mode": "sync", "learn": True})
            assert same == text
            accepted = sum(each["accepted"] for each in shared["sources"] if each["source"] == "shared")
            if accepted > TOKENS / 2:
                break
        assert accepted > TOKENS / 2
        same, alone, _ = await ask(fleet, {"mode": "sync"})
        assert same == text
        assert "shared" not in {each["source"] for each in alone["sources"]}

        for asked, rule in (({"seed": None}, "rejection_sampling"), ({"temperature": 0}, "greedy")):
            _, told, _ = await ask(fleet, {}, max_tokens=1, **asked)
            assert told["rule"] == rule

        # By a stop string the gateway ends the sequence, and the verifier tells all the same.
        _, stopped, _ = await ask(fleet, {}, stop=[text[40:44]])
        assert 0 < stopped["verifications"] <= TOKENS
        assert stopped["unaccounted_tokens"] == 0

        streamed = await fleet.http.post("/v1/completions", json=BODY | {"stream": True, "outrider": {"stats": True}})
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == text
        assert chunks[-1]["outrider"]["choices"][0]["tokens"] == TOKENS
        await fleet.quiet()


async def test_what_a_request_generated_drafts_for_the_next_one_at_another_verifier() -> None:
    async with engine_fleet(verifiers=2, drafters=1, mode="sync") as fleet:
        first, second = fleet.verifiers

        async def only_at(serving: Verifier) -> None:
            fleet.route_only_to(serving)
            await eventually(lambda: [link.member.id for link in fleet.core.routable()] == [serving.name])

        await only_at(first)
        text, told, _ = await ask(fleet, {"learn": True})
        assert "shared" not in {each["source"] for each in told["sources"]}
        await ask(fleet, {"learn": False}, seed=6)
        await only_at(second)
        _, alone, _ = await ask(fleet, {"learn": True}, seed=6)
        assert not [each for each in alone["sources"] if each["source"] == "shared" and each["accepted"] > TOKENS / 4]
        same, shared, _ = await ask(fleet, {"learn": True})
        assert same == text
        assert sum(each["accepted"] for each in shared["sources"] if each["source"] == "shared") > TOKENS / 4
        await fleet.quiet()
