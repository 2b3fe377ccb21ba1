"""Requests that are too large, malformed or meant to harm: each is answered, names what is wrong, and holds nobody else up."""

import asyncio
import copy
import gc
import json
import multiprocessing
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists

from backend.engine.front import grammar as grammar_checks
from tests.support.fake_verifier import Behaviour, FakeVerifier, Sequence, eventually
from tests.support.running_gateway import CHAT, COMPLETION, Running, running_gateway
from tests.support.watchers import attempts

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MIB = 1 << 20
JSON = {"content-type": "application/json"}


def completion(**fields: Any) -> Any:
    return {**COMPLETION, **fields}


def chat(**fields: Any) -> Any:
    return {**CHAT, **fields}


def user(content: Any) -> Any:
    return chat(messages=[{"role": "user", "content": content}])


def made_from(given: Any, **fields: Any) -> Any:
    return {"model": "demo", "input": given, "max_output_tokens": 6, **fields}


def grammar(**fields: Any) -> Any:
    return completion(structured_outputs=fields)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def tools(count: int, schema: Any) -> Any:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


BOMB = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
ITEM = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
TEXT_PART = {"type": "input_text", "text": "x"}
UNKNOWN = "unknown_parameter"
CONTEXT = "context_length_exceeded"

ROWS: list[tuple[str, str, Any, int, str | None, str | None]] = [
    # what, path, body, status, param, code
    # The body itself
    ("body over the limit", COMPLETIONS, b" " * (20 * MIB + 1), 413, None, "payload_too_large"),
    ("lists of lists", COMPLETIONS, b'{"prompt": [' + b"[]," * (5 * MIB) + b"[]]}", 413, None, "payload_too_large"),
    ("deep brackets", COMPLETIONS, b"[" * 200_000, 400, None, "invalid_json"),
    ("escapes", COMPLETIONS, b'{"prompt": "' + b"\\n" * (4 * MIB) + b'"}', 400, "prompt", CONTEXT),
    ("half a surrogate", COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None, "invalid_json"),
    ("a number of a million digits", COMPLETIONS, b'{"n": ' + b"1" * MIB + b"}", 400, None, "invalid_json"),
    ("ten thousand unknown fields", COMPLETIONS, completion(**{f"f{i}": 1 for i in range(10_000)}), 400, "f0", UNKNOWN),
    ("a field's long name", COMPLETIONS, completion(**{"f" * MIB: 1}), 400, "f" * 64, UNKNOWN),
    # Prompts and messages
    ("1,000 prompts of 64 choices", COMPLETIONS, completion(prompt=["a"] * 1000, n=64), 400, "prompt", None),
    ("a huge n", COMPLETIONS, completion(n=10**12), 400, "n", None),
    ("a long prompt", COMPLETIONS, completion(prompt="abc " * (3 * MIB)), 400, "prompt", CONTEXT),
    ("an endless word", COMPLETIONS, completion(prompt="a" * (12 * MIB)), 400, "prompt", CONTEXT),
    ("a prompt of tokens beyond the context", COMPLETIONS, completion(prompt=[5] * 200_000), 400, None, CONTEXT),
    ("a prompt of lists of floats", COMPLETIONS, completion(prompt=[[1.5] * 1000] * 100), 400, "prompt", None),
    ("an empty prompt among others", COMPLETIONS, completion(prompt=["a", ""], echo=True), 400, "prompt", None),
    ("a token that is none", COMPLETIONS, completion(prompt=[10**6]), 400, "prompt", None),
    ("too many messages", CHATS, chat(messages=CHAT["messages"] * 3000), 400, "messages", None),
    ("as many contents, all wrong", CHATS, chat(messages=[{"role": "user", "content": 5}] * 2000), 400, "messages", None),
    ("null content", CHATS, user(None), 400, "messages", None),
    ("too many parts", CHATS, user([{"type": "text", "text": "x"}] * 2000), 400, "messages", None),
    ("deep content", CHATS, user([{"type": "text", "text": "x", "more": nested(100)}]), 400, "messages", None),
    ("long content", CHATS, user("abc " * (3 * MIB)), 400, "messages", CONTEXT),
    ("too many tool calls", CHATS, chat(messages=[{"role": "assistant", "tool_calls": [{}] * 200}]), 400, "messages", None),
    # Lists
    ("a stop of 9 MB", COMPLETIONS, completion(stop=["x" * 9 * MIB]), 400, "stop", None),
    ("bad words of 9 MB", COMPLETIONS, completion(bad_words=["abc " * 2 * MIB]), 400, "bad_words", None),
    ("an empty bad word", COMPLETIONS, completion(bad_words=[""]), 400, "bad_words", None),
    ("many biases", COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(100_000)}), 400, "logit_bias", None),
    ("a bias of no token", COMPLETIONS, completion(logit_bias={"99999999": 1}), 400, "logit_bias", None),
    ("many tools", CHATS, chat(tools=tools(1025, {})), 400, "tools", None),
    ("deep tools", CHATS, chat(tools=tools(1, nested(100))), 400, "tools", None),
    # Numbers
    ("a seed of 70 bits", COMPLETIONS, completion(seed=2**70), 400, "seed", None),
    ("max_tokens of 70 bits", COMPLETIONS, completion(max_tokens=2**70), 400, "max_tokens", CONTEXT),
    ("logprobs of the whole vocabulary", COMPLETIONS, completion(prompt_logprobs=-1), 400, "prompt_logprobs", None),
    # Templates
    ("a template", CHATS, chat(chat_template="{% for i in range(10**9) %}x{% endfor %}"), 400, "chat_template", None),
    ("arguments: messages", CHATS, chat(chat_template_kwargs={"messages": 5}), 400, "chat_template_kwargs", None),
    ("arguments: self", CHATS, chat(chat_template_kwargs={"self": 5}), 400, "chat_template_kwargs", None),
    # Grammars
    ("a schema that is itself", COMPLETIONS, grammar(json={"$ref": "#"}), 400, "structured_outputs", None),
    ("a schema that leads nowhere", COMPLETIONS, grammar(json={"$ref": "#/no"}), 400, "structured_outputs", None),
    ("a deep schema", COMPLETIONS, grammar(json=nested(100)), 400, "structured_outputs", None),
    ("a large schema", COMPLETIONS, grammar(json={"enum": ["x" * 100] * 5000}), 400, "structured_outputs", None),
    ("a schema that takes minutes", COMPLETIONS, grammar(json=BOMB), 400, "structured_outputs", None),
    ("the same again", COMPLETIONS, grammar(json=BOMB), 400, "structured_outputs", None),
    ("a schema of no type", COMPLETIONS, grammar(json={"type": "nope"}), 400, "structured_outputs", None),
    ("a regex of 200 kB", COMPLETIONS, grammar(regex="a" * 200_000), 400, "structured_outputs", None),
    ("a regex that looks ahead", COMPLETIONS, grammar(regex="(?=a)b"), 400, "structured_outputs", None),
    ("a grammar without an end", COMPLETIONS, grammar(grammar='root ::= root "a"'), 400, "structured_outputs", None),
    ("a format that is itself", CHATS,
     chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}),
     400, "response_format", None),
    # Responses
    ("too many items", RESPONSES, made_from([ITEM] * 2049), 400, "input", None),
    ("items that are numbers", RESPONSES, made_from([5] * 200_000), 400, "input", None),
    ("as many items, all wrong", RESPONSES, made_from([{"type": "nope"}] * 2048), 400, "input", None),
    ("an item of no type", RESPONSES, made_from([{"type": [5]}]), 400, "input", None),
    ("wrong parts of an item", RESPONSES, made_from([{**ITEM, "content": [{"type": "no"}] * 1024}]), 400, "input", None),
    ("too many parts of all items", RESPONSES, made_from([{**RESULT, "output": [TEXT_PART] * 1000}] * 70), 400, "input", None),
    ("a deep item", RESPONSES, made_from([nested(100)]), 400, "input", None),
    ("a long item", RESPONSES, made_from([{"role": "user", "content": "abc " * (3 * MIB)}]), 400, "input", CONTEXT),
    ("2,048 items", RESPONSES, made_from([ITEM] * 2048), 400, None, CONTEXT),
    ("2,048 calls", RESPONSES, made_from([CALL] * 2048), 200, None, None),
    ("as many in a conversation", "/v1/conversations", {"items": [ITEM] * 2048}, 400, "items", None),
    # Tokens
    ("a text of 15 MB to tokenize", "/tokenize", {"prompt": "abc " * (15 * MIB // 4)}, 400, "prompt", CONTEXT),
    ("tokens that are none", "/detokenize", {"tokens": ["x"] * 200_000}, 400, "tokens", None),
    # Within the bounds
    ("200,000 tokens to detokenize", "/detokenize", {"tokens": [300] * 200_000}, 200, None, None),
    ("512 sequences", COMPLETIONS, completion(prompt=["a"] * 8, n=64, max_tokens=2), 200, None, None),
    ("2,000 messages", CHATS, chat(messages=[{"role": "user", "content": ""}] * 2000), 400, None, CONTEXT),
    ("64 stops", COMPLETIONS, completion(stop=["wxyz"] * 64), 200, None, None),
    ("1,024 tools, not to be called", CHATS, chat(tools=tools(1024, {"type": "object"}), tool_choice="none"), 200, None, None),
    ("a regex that repeats", COMPLETIONS, grammar(regex="((a{0,1000}){0,1000}){0,100000}"), 200, None, None),
    ("a thousand choices", COMPLETIONS, grammar(choice=[f"v{i}" for i in range(1000)]), 200, None, None),
]  # fmt: skip


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[Running]:
    with mock.patch.object(grammar_checks, "CPU_LIMIT_S", 1.0):
        async with running_gateway() as gateway:
            # The process that compiles takes seconds to import vLLM.
            await gateway.http.post(COMPLETIONS, json=grammar(choice=["a"]))
            # As in a process that is the gateway's alone: to look through what was imported takes longer than a stall may.
            gc.collect()
            gc.freeze()
            yield gateway


@pytest.mark.parametrize(("what", "path", "body", "status", "param", "code"), ROWS, ids=[row[0] for row in ROWS])
async def test_it_is_answered_and_holds_nobody_up(running, what, path, body, status, param, code, timed):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for stalls in attempts(timed):
        with stalls.watched():
            answer = await running.http.post(path, content=content, headers=JSON)
            await running.until_idle()
        assert answer.status_code == status, answer.text[:500]
    if status != 200:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code), error
        assert error["message"]
        assert len(answer.content) < 2000


def children() -> set[Any]:
    """Processes that were forked from here: those that compile grammars, and others."""
    return {each.pid for each in multiprocessing.active_children()}


async def test_a_grammar_is_given_up_when_its_client_leaves(gateway, monkeypatch):
    monkeypatch.setattr(grammar_checks, "CPU_LIMIT_S", 600.0)
    others = children()
    async with running_gateway() as running:
        # Another one each time: what is known is not compiled.
        bombs = [{**BOMB, "title": f"{index}"} for index in range(3)]
        for each in bombs:
            running.begin(structured_outputs={"json": each})
        await eventually(lambda: len(children() - others) == grammar_checks.WORKERS)
        processes = children() - others
        await running.leave()
        await eventually(lambda: not processes & children())
        await running.until_idle()
        assert (await running.http.post(COMPLETIONS, json=grammar(choice=["b", "c"]))).status_code == 200


async def test_a_grammar_that_crashes_its_process_is_refused(gateway, monkeypatch):
    monkeypatch.setattr(grammar_checks, "CPU_LIMIT_S", 600.0)
    others = children()
    async with running_gateway() as running:
        assert (await running.http.post(COMPLETIONS, json=grammar(choice=["a"]))).status_code == 200
        (pid,) = children() - others
        process = psutil.Process(pid)
        idle = process.cpu_times().user
        request = running.begin(structured_outputs={"json": {**BOMB, "title": "crash"}})
        await eventually(lambda: process.cpu_times().user > idle + 0.2)
        process.kill()
        answer = await request
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")
        assert "takes too long, or too much memory" in answer.text
        assert (await running.http.post(COMPLETIONS, json=grammar(choice=["b"]))).status_code == 200


async def test_verifiers_get_what_was_checked(running):
    before = len(running.verifier.sequences)
    await running.http.post(COMPLETIONS, json=grammar(choice=["one", "two"]))
    (sequence,) = running.verifier.sequences[before:]
    sent = sequence.request.sampling_params.structured_outputs
    assert sent._backend == "xgrammar"
    assert sent.choice is None, "vLLM sends choices as a grammar"
    assert '"one"' in sent.grammar


async def test_patterns_and_schemas_are_not_logged(running, caplog, capfd):
    for pattern in ("tangerine(", "tangerine{0,5}"):
        await running.http.post(COMPLETIONS, json=grammar(regex=pattern))
    written = capfd.readouterr()
    assert "tangerine" not in caplog.text + written.out + written.err


async def test_log_probabilities_of_a_prompt_are_bounded(running, monkeypatch):
    monkeypatch.setattr("backend.engine.front.client.MAX_PROMPT_LOGPROBS", 60)
    for fields in ({"prompt_logprobs": 5}, {"echo": True, "logprobs": 5}):
        body = completion(prompt=[5] * 11, **fields)
        error = (await running.http.post(COMPLETIONS, json=body)).json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "prompt_logprobs")
        assert running.idle


def likely(count: int) -> Behaviour:
    """All tokens with the log probabilities of `count` others each."""
    ids = np.arange(300, 301 + count)
    row = LogprobsLists(ids[None], np.linspace(-1.0, -9.0, count + 1)[None], np.ones(1, int))

    async def behaviour(verifier: FakeVerifier, sequence: Sequence) -> None:
        for position in range(sequence.max_tokens):
            async with verifier.turn:
                sequence.emit([300], FinishReason.LENGTH if position == sequence.max_tokens - 1 else None, logprobs=row)
                await asyncio.sleep(0)

    return behaviour


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(logprobs=20, n=32)),
        (CHATS, chat(logprobs=True, top_logprobs=20, n=32)),
        (f"{CHATS}/batch", chat(messages=[CHAT["messages"]] * 32, logprobs=True, top_logprobs=20)),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 20, "n": 32}}),
    ],
)
async def test_many_log_probabilities_of_an_answer_hold_nobody_up(running, path, body, monkeypatch, timed):
    monkeypatch.setattr(running.verifier, "behaviour", likely(20))
    count = 200 if timed else 40
    body = copy.deepcopy(body)
    body.get("sampling_params", body)["max_tokens"] = count
    for stalls in attempts(timed):
        with stalls.watched():
            answer = await running.http.post(path, json=body)
        assert answer.status_code == 200, answer.text[:500]
        logprobs = answer.json()["choices"][31]["logprobs"]
        tokens = logprobs["content"] if "content" in logprobs else logprobs["top_logprobs"]
        assert len(tokens) == count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("few", [True, False])
async def test_many_log_probabilities_of_a_response_hold_nobody_up_and_a_few_are_kept(running, few, stream, monkeypatch, timed):
    monkeypatch.setattr(running.verifier, "behaviour", likely(20))
    monkeypatch.setattr(running.server.gateway.client.model_config, "max_model_len", 4096)
    include = ["message.output_text.logprobs"]
    count = 50 if few else 3000 if timed else 1000
    body = made_from("x", max_output_tokens=count, include=include, top_logprobs=20, stream=stream)
    # Garbage collections over what vLLM keeps of a stream may take as long.
    for stalls in attempts(timed and not stream):
        with stalls.watched():
            answer = await running.http.post(RESPONSES, json=body)
        response = json.loads(answer.text.rpartition("data: ")[2])["response"] if stream else answer.json()
        kept = (await running.http.get(f"{RESPONSES}/{response['id']}")).json()
        made, again = (each["output"][0]["content"][0] for each in (response, kept))
        assert again["text"] == made["text"]
        if few:
            assert len(again["logprobs"]) == len(made["logprobs"]) == count
        else:
            assert answer.text.count('"top_logprobs":[{') == count
            assert again["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "body", "serving", "name"),
    [
        ("/tokenize", {"prompt": "x"}, "tokenization", "create_tokenize"),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": CHAT["messages"]}, "messages", "count_tokens"),
        ("/v1/responses/input_tokens", made_from("x"), "renderer", "render_responses"),
    ],
)
async def test_prompts_do_not_wait_for_all_that_is_to_be_tokenized(running, monkeypatch, path, body, serving, name):
    serving = getattr(running.server.gateway.services, serving)
    create, gate, most = getattr(serving, name), asyncio.Event(), []

    async def slow(*args):
        most.append(1)
        await gate.wait()
        return await create(*args)

    monkeypatch.setattr(serving, name, slow)
    requests = [asyncio.ensure_future(running.http.post(path, json=body)) for _ in range(20)]
    await eventually(lambda: len(most) == 2)
    assert (await running.http.post(COMPLETIONS, json=COMPLETION)).status_code == 200
    assert len(most) == 2
    gate.set()
    assert {(await request).status_code for request in requests} == {200}


@pytest.mark.parametrize(("most", "memory"), [(3, 1 << 29), (64, 40_000)])
async def test_what_does_not_generate_is_bounded_too(monkeypatch, most, memory):
    """By number, and by the bytes of its bodies, which wait in memory for a thread."""
    monkeypatch.setattr("gateway.auth.access.MAX_ARRIVING_BYTES", memory)
    async with running_gateway(max_in_flight=most) as running:
        renderer, gate, begun = running.server.gateway.services.renderer, asyncio.Event(), []
        render = renderer.render_responses

        async def slow(*args):
            begun.append(1)
            await gate.wait()
            return await render(*args)

        monkeypatch.setattr(renderer, "render_responses", slow)
        body = {"model": "demo", "input": "x", "metadata": {str(n): "y" * 500 for n in range(16)}}
        requests = [asyncio.ensure_future(running.http.post("/v1/responses/input_tokens", json=body)) for _ in range(10)]
        await eventually(lambda: len(begun) == 2 and sum(each.done() for each in requests) > 4)
        assert (await running.http.post(COMPLETIONS, json=COMPLETION)).status_code == 200
        gate.set()
        statuses = Counter(answer.status_code for answer in await asyncio.gather(*requests))
        assert statuses[200] + statuses[429] == 10
        assert 3 <= statuses[200] <= 5
        assert (await running.http.post("/v1/responses/input_tokens", json=body)).status_code == 200
