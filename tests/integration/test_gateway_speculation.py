"""What a request asks of speculation, and is told: over HTTP, in front of fake verifiers."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.wire import engine as wire
from backend.wire.engine import Account, RequestOptions, Tally
from tests.integration.test_gateway_responses import ended
from tests.support.fake_verifier import FakeVerifier, Sequence, count_up, eventually
from tests.support.running_gateway import CHAT, COMPLETION, RESPONSE, Keys, Running, events, running_gateway

STATS: dict[str, Any] = {"outrider": {"stats": True}}


def tell(verifier: FakeVerifier, sequence: Sequence, **fields: Any) -> None:
    account = Account(sequence.request_id, **fields)
    verifier.send(sequence.client, wire.ACCOUNTS, msgspec.msgpack.encode([account]))


async def drafting(verifier: FakeVerifier, sequence: Sequence) -> None:
    """Six tokens in two verifications, one of which had a draft from each source."""
    drafts = [Tally("fresh", "drafter-0", 1, 4, 2), Tally("prediction", "lookup", 2, 7, 3)]
    tell(
        verifier,
        sequence,
        tokens=6,
        verifications=2,
        accepted_lengths=[0, 1, 0, 1],
        tallies=drafts,
        waited_s=0.25,
        rule="greedy",
    )
    await count_up(verifier, sequence)


async def test_options_reach_the_verifier_and_nothing_else_does():
    text = "def f(x):\n    return x\n"
    parts = [{"type": "text", "text": "def f(x):\n"}, {"type": "text", "text": "    return x\n"}]
    async with running_gateway(mode="auto") as running:
        plain: list[dict[str, Any]] = [{"outrider": value} for value in (None, {}, {"mode": None, "stats": False})]
        for body in ({}, {"prediction": None}, *plain):
            response = await running.http.post("/v1/chat/completions", json={**CHAT, **body})
            assert response.status_code == 200, response.text
            assert "outrider" not in response.json()
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [each.addition.options for each in running.verifier.sequences] == [None] * 5

        running.verifier.sequences.clear()
        tokens = (await running.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
        bodies: list[dict[str, Any]] = [{"outrider": {"mode": "ahead", "num_speculative_tokens": 2}}]
        for body in (*bodies, *({"prediction": {"type": "content", "content": each}} for each in (text, parts))):
            running.verifier.behaviour = drafting if "prediction" in body else count_up
            assert (await running.http.post("/v1/chat/completions", json={**CHAT, **body})).status_code == 200
        first, *others = [each.addition.options for each in running.verifier.sequences]
        assert first == RequestOptions(mode="ahead", longest=2)
        assert others == [RequestOptions(account=True, prediction=tokens)] * 2

        running.verifier.sequences.clear()
        await running.http.post("/v1/completions", json={**COMPLETION, "outrider": {"learn": False}})
        refusing = {"X-Outrider-Learn": "0"}
        for path, base in (("/v1/chat/completions", CHAT), ("/v1/messages", CHAT), ("/v1/responses", RESPONSE)):
            assert (await running.http.post(path, json=base, headers=refusing)).status_code == 200
        assert [each.addition.options for each in running.verifier.sequences] == [RequestOptions(learn=False)] * 4
        response = await running.http.post("/v1/messages", json=CHAT, headers={"X-Outrider-Learn": "no"})
        assert response.status_code == 400


async def test_verifiers_are_told_tenant_and_session_by_labels(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    made = {name: keys.put(name) for name in ("Ada", "Bob")}
    async with running_gateway(keys_file=str(keys.file)) as running:
        for name, session in (("Ada", "first"), ("Ada", "second"), ("Bob", "first"), ("Bob", "")):
            headers = {**made[name], "x-session-id": session}
            assert (await running.http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200
        options = [each.addition.options or RequestOptions() for each in running.verifier.sequences]
        assert options[0].tenant == options[1].tenant != options[2].tenant == options[3].tenant
        assert options[0].session == options[2].session != options[1].session
        assert options[3] == RequestOptions(tenant=options[2].tenant)
        assert not any(secret in repr(options) for secret in ("Ada", "Bob", "first", "second"))


@pytest.mark.parametrize(("path", "base"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_an_answer_tells_what_drafts_did(running: Running, path: str, base: dict[str, Any]) -> None:
    running.verifier.behaviour = drafting
    predicted = {**base, "prediction": {"type": "content", "content": "x = 1"}}
    whole = (await running.http.post(path, json={**predicted, **STATS})).json()
    (choice,) = whole["outrider"]["choices"]
    assert choice.pop("tokens_per_second") > 0
    assert choice == {
        "index": 0,
        "mode": "sync",
        "rule": "greedy",
        "tokens": 6,
        "unaccounted_tokens": 0,
        "verifications": 2,
        "tokens_per_verification": 3.0,
        "drafted": 11,
        "accepted": 5,
        "accepted_lengths": [0, 1, 0, 1],
        "sources": [
            {"source": "fresh", "drafter": "drafter-0", "drafts": 1, "drafted": 4, "accepted": 2},
            {"source": "prediction", "drafter": "lookup", "drafts": 2, "drafted": 7, "accepted": 3},
        ],
        "waited_s": 0.25,
        "moves": [],
    }
    wanted = {"accepted_prediction_tokens": 3, "audio_tokens": 0, "reasoning_tokens": 0, "rejected_prediction_tokens": 4}
    assert whole["usage"]["completion_tokens_details"] == wanted
    response = await running.http.post(path, json={**predicted, "stream": True}, headers={"X-Outrider-Stats": "1"})
    *chunks, last = events(response.content)
    assert all("outrider" not in chunk and not chunk.get("usage") for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens_details"] == wanted
    assert last["outrider"]["choices"][0]["accepted"] == 5
    # A prediction alone brings no chunk that was not asked for.
    response = await running.http.post(path, json={**predicted, "stream": True})
    assert all(chunk["choices"] and "outrider" not in chunk for chunk in events(response.content))


async def test_it_tells_of_each_choice(running: Running) -> None:
    async def numbered(verifier: FakeVerifier, sequence: Sequence) -> None:
        # By the last token of its prompt, and in vLLM's order within it.
        choice = int(sequence.request.request_id.partition("_")[0])
        tell(verifier, sequence, tokens=6, verifications=1 + choice + 10 * (sequence.request.prompt_token_ids[-1] == 7))
        await count_up(verifier, sequence)

    running.verifier.behaviour = numbered
    body = {**COMPLETION, **STATS, "prompt": [[5, 6], [5, 7]], "n": 3, "temperature": 1}
    choices = (await running.http.post("/v1/completions", json=body)).json()["outrider"]["choices"]
    assert [(each["index"], each["verifications"]) for each in choices] == list(enumerate([1, 2, 3, 11, 12, 13]))
    body = {**CHAT, **STATS, "n": 3, "temperature": 1}
    choices = (await running.http.post("/v1/chat/completions", json=body)).json()["outrider"]["choices"]
    assert [(each["index"], each["verifications"]) for each in choices] == [(0, 1), (1, 2), (2, 3)]


async def test_who_leaves_is_forgotten(running: Running) -> None:
    async def silent(verifier: FakeVerifier, sequence: Sequence) -> None:
        await sequence.aborted.wait()
        tell(verifier, sequence)

    running.verifier.behaviour = silent
    running.begin(**STATS, stream=True)
    await eventually(lambda: len(running.core._accounts) == 1)
    await running.leave()
    await eventually(lambda: running.idle and not running.core._accounts)


async def test_responses_and_messages_tell_it_too(running: Running):
    running.verifier.behaviour = drafting
    responses, messages = running.client.responses, running.anthropic.messages
    for extra in ({"extra_body": STATS}, {"extra_headers": {"X-Outrider-Stats": "1"}}):
        made = await responses.create(**RESPONSE, **extra)
        assert accepted_of(made) == accepted_of(await responses.retrieve(made.id)) == 5
        *_, last = [event async for event in await responses.create(**RESPONSE, **extra, stream=True)]
        assert accepted_of(last.response) == 5
        begun = await responses.create(**RESPONSE, **extra, background=True)
        assert accepted_of(await ended(responses, begun)) == 5
        assert accepted_of(await messages.create(**CHAT, **extra)) == 5
        async with messages.stream(**CHAT, **extra) as stream:
            seen = [event async for event in stream]
            assert (await stream.get_final_message()).usage.output_tokens == 6
        assert [event.type for event in seen if hasattr(event, "outrider")] == ["message_delta"]
        (delta,) = (event for event in seen if event.type == "message_delta")
        assert accepted_of(delta) == 5
    for path, base in (("/v1/responses", RESPONSE), ("/v1/messages", CHAT)):
        assert "outrider" not in (await running.http.post(path, json=base)).json()
        answer = await running.http.post(path, json={**base, "outrider": {"mode": "fast"}})
        assert answer.status_code == 400
        assert "outrider.mode" in answer.text
        assert (await running.http.post(path, json=base, headers={"X-Outrider-Stats": "yes"})).status_code == 400


def accepted_of(answer: Any) -> int:
    (choice,) = answer.to_dict()["outrider"]["choices"]
    return int(choice["accepted"])


async def test_a_moved_request_adds_up_and_a_lost_verifier_leaves_tokens_unaccounted():
    async def first_half(verifier: FakeVerifier, sequence: Sequence) -> None:
        if sequence.emitted:
            rest = sequence.max_tokens - len(sequence.emitted)
            tallies = [Tally("fresh", "b", 1, 2, 1)]
            tell(verifier, sequence, tokens=rest, verifications=1, accepted_lengths=[0, 1], tallies=tallies)
            await count_up(verifier, sequence)
            return
        sequence.emit([300, 301])
        await sequence.aborted.wait()
        tell(verifier, sequence, tokens=2, verifications=2, accepted_lengths=[1, 0, 1], tallies=[Tally("fresh", "b", 1, 2, 0)])

    async with running_gateway(verifiers=2) as running:
        for verifier in running.verifiers:
            verifier.behaviour = first_half

        for loses in (False, True):
            answer = running.begin(**STATS)
            await running.until_emitted()
            (record,) = running.core.sequences
            if loses:
                next(each for each in running.verifiers if each.name == record.link.member.id).kill()
            else:
                assert running.core.migrate([record], None, "test") == 1
            (choice,) = (await answer).json()["outrider"]["choices"]
            assert choice["tokens"] == 6
            if loses:
                assert (choice["unaccounted_tokens"], choice["verifications"]) == (2, 1)
                assert choice["moves"][0]["kind"] == "failover"
            else:
                assert (choice["unaccounted_tokens"], choice["verifications"]) == (0, 3)
                assert choice["accepted_lengths"] == [1, 1, 1]
                assert choice["sources"] == [{"source": "fresh", "drafter": "b", "drafts": 2, "drafted": 4, "accepted": 1}]
                assert choice["moves"] == [{"kind": "migration", "cause": "test"}]
