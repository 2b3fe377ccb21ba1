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
from tests.support.running_gateway import CHAT, COMPLETION, MODEL_DIR, Running, running_gateway
from tests.support.watchers import attempts

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GENERATE, BATCH, CONVERSATIONS = "/inference/v1/generate", "/v1/chat/completions/batch", "/v1/conversations"
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


def tokens(**fields: Any) -> Any:
    return {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}, **fields}


def sampling(**fields: Any) -> Any:
    return tokens(sampling_params=fields)


BOMB = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
ITEM = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
TEXT_PART = {"type": "input_text", "text": "x"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(1024)]
TALKS = [CHAT["messages"]] * 2
UNKNOWN, INVALID = "unknown_parameter", "invalid_json"
CONTEXT = "context_length_exceeded"
MODEL = "model_not_found"

ROWS: list[tuple[str, str, Any, int, str | None, str | None]] = [
    # what, path, body (none: it is a GET), status, param, code
    # The URL
    ("an unknown path", "/nowhere", None, 404, None, "not_found"),
    ("an unknown model", "/v1/models/nope", None, 404, "model", MODEL),
    ("the wrong method", COMPLETIONS, None, 405, None, "method_not_allowed"),
    ("a query of the wrong type", f"{RESPONSES}/r?stream=7", None, 400, "stream", None),
    ("a limit that is no number", f"{RESPONSES}/r/input_items?limit=x", None, 400, "limit", None),
    # The body itself
    ("body over the limit", COMPLETIONS, b" " * (20 * MIB + 1), 413, None, "payload_too_large"),
    ("lists of lists", COMPLETIONS, b'{"prompt": [' + b"[]," * (5 * MIB) + b"[]]}", 413, None, "payload_too_large"),
    ("deep brackets", COMPLETIONS, b"[" * 200_000, 400, None, INVALID),
    ("half an object", COMPLETIONS, b"{", 400, None, INVALID),
    ("no object", COMPLETIONS, b"[]", 400, None, INVALID),
    ("not a number", COMPLETIONS, b'{"temperature": NaN}', 400, None, INVALID),
    ("infinity", COMPLETIONS, b'{"temperature": 1e999}', 400, None, INVALID),
    ("escapes", COMPLETIONS, b'{"prompt": "' + b"\\n" * (4 * MIB) + b'"}', 400, "prompt", CONTEXT),
    ("half a surrogate", COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None, INVALID),
    ("no UTF-8", COMPLETIONS, b'{"prompt": "\xff"}', 400, None, INVALID),
    ("a number of a million digits", COMPLETIONS, b'{"n": ' + b"1" * MIB + b"}", 400, None, INVALID),
    ("ten thousand unknown fields", COMPLETIONS, completion(**{f"f{i}": 1 for i in range(10_000)}), 400, "f0", UNKNOWN),
    ("a field's long name", COMPLETIONS, completion(**{"f" * MIB: 1}), 400, "f" * 64, UNKNOWN),
    # Models
    ("a completion's model", COMPLETIONS, completion(model="nope"), 404, "model", MODEL),
    ("a response's model", RESPONSES, made_from("x", model="nope"), 404, "model", MODEL),
    ("the tokenizer's model", "/tokenize", {"model": "nope", "prompt": "x"}, 404, "model", MODEL),
    ("a model for tokens", GENERATE, tokens(model="nope"), 404, "model", MODEL),
    ("embeddings of a model that writes", "/v1/embeddings", {"model": "demo", "input": "x"}, 400, "model", None),
    ("ranks of a model that writes", "/v1/rerank", {"model": "demo", "query": "x", "documents": ["y"]}, 400, "model", None),
    # Prompts and messages
    ("a long prompt", COMPLETIONS, completion(prompt="abc " * (3 * MIB)), 400, "prompt", CONTEXT),
    ("a longer prompt than the context", COMPLETIONS, completion(prompt="x y z " * 300, stream=True), 400, None, CONTEXT),
    ("an endless word", COMPLETIONS, completion(prompt="a" * (12 * MIB)), 400, "prompt", CONTEXT),
    ("a prompt of tokens beyond the context", COMPLETIONS, completion(prompt=[5] * 200_000), 400, None, CONTEXT),
    ("a prompt of lists of floats", COMPLETIONS, completion(prompt=[[1.5] * 1000] * 100), 400, "prompt", None),
    ("an empty prompt among others", COMPLETIONS, completion(prompt=["a", ""], echo=True), 400, "prompt", None),
    ("a token that is none", COMPLETIONS, completion(prompt=[10**6]), 400, "prompt", None),
    ("no messages", CHATS, {"model": "demo"}, 400, "messages", None),
    ("2,000 contents, all wrong", CHATS, chat(messages=[{"role": "user", "content": 5}] * 2000), 400, "messages", None),
    ("null content", CHATS, user(None), 400, "messages", None),
    ("too many parts", CHATS, user([{"type": "text", "text": "x"}] * 2000), 400, "messages", None),
    ("a picture", CHATS, user([PICTURE]), 400, None, None),
    ("long content", CHATS, user("abc " * (3 * MIB)), 400, "messages", CONTEXT),
    ("too many tool calls", CHATS, chat(messages=[{"role": "assistant", "tool_calls": [{}] * 200}]), 400, "messages", None),
    ("one talk as if it were many", BATCH, chat(), 400, "messages", None),
    ("talks of many choices", BATCH, chat(messages=TALKS, n=2), 400, "n", None),
    ("talks that stream", BATCH, chat(messages=TALKS, stream=True), 400, "stream", UNKNOWN),
    # Lists
    ("an empty bad word", COMPLETIONS, completion(bad_words=[""]), 400, "bad_words", None),
    ("a bias of no token", COMPLETIONS, completion(logit_bias={"99999999": 1}), 400, "logit_bias", None),
    # Numbers
    ("a seed of 70 bits", COMPLETIONS, completion(seed=2**70), 400, "seed", None),
    ("max_tokens of 70 bits", COMPLETIONS, completion(max_tokens=2**70), 400, "max_tokens", CONTEXT),
    ("top_k of 100 bits", CHATS, chat(top_k=10**30), 400, None, None),
    ("a temperature below zero", CHATS, chat(temperature=-1, stream=True), 400, "temperature", None),
    ("logprobs of the whole vocabulary", COMPLETIONS, completion(prompt_logprobs=-1), 400, "prompt_logprobs", None),
    # What goes with something else
    ("options of no stream", CHATS, chat(stream_options={"include_usage": True}), 400, "stream_options", None),
    ("a call of no tools", CHATS, chat(tool_choice="required"), 400, "tool_choice", None),
    # Templates
    ("a template", CHATS, chat(chat_template="{% for i in range(10**9) %}x{% endfor %}"), 400, "chat_template", None),
    ("arguments: messages", CHATS, chat(chat_template_kwargs={"messages": 5}), 400, "chat_template_kwargs", None),
    ("arguments: self", CHATS, chat(chat_template_kwargs={"self": 5}), 400, "chat_template_kwargs", None),
    # Grammars
    ("a schema that is itself", COMPLETIONS, grammar(json={"$ref": "#"}), 400, "structured_outputs", None),
    ("a schema that leads nowhere", COMPLETIONS, grammar(json={"$ref": "#/no"}), 400, "structured_outputs", None),
    ("a large schema", COMPLETIONS, grammar(json={"enum": ["x" * 100] * 5000}), 400, "structured_outputs", None),
    ("a schema that takes minutes", COMPLETIONS, grammar(json=BOMB), 400, "structured_outputs", None),
    ("the same again", COMPLETIONS, grammar(json=BOMB), 400, "structured_outputs", None),
    ("a schema of no type", COMPLETIONS, grammar(json={"type": "nope"}), 400, "structured_outputs", None),
    ("a regex of 200 kB", COMPLETIONS, grammar(regex="a" * 200_000), 400, "structured_outputs", None),
    ("a grammar without an end", COMPLETIONS, grammar(grammar='root ::= root "a"'), 400, "structured_outputs", None),
    # Responses
    ("no items", RESPONSES, made_from([]), 400, "input", None),
    ("too many items", RESPONSES, made_from([ITEM] * 2049), 400, "input", None),
    ("items that are numbers", RESPONSES, made_from([5] * 200_000), 400, "input", None),
    ("2,048 items, all wrong", RESPONSES, made_from([{"type": "nope"}] * 2048), 400, "input", None),
    ("an item of no type", RESPONSES, made_from([{"type": [5]}]), 400, "input", None),
    ("a search that no server made", RESPONSES, made_from([{"type": "web_search_call"}]), 400, "input", None),
    ("a reference that is none", RESPONSES, made_from([{"type": "item_reference", "id": ["x"]}]), 400, "input", None),
    ("an id that is none", RESPONSES, made_from([{**ITEM, "id": 5}]), 400, "input", None),
    ("wrong parts of an item", RESPONSES, made_from([{**ITEM, "content": [{"type": "no"}] * 1024}]), 400, "input", None),
    ("too many parts of all items", RESPONSES, made_from([{**RESULT, "output": [TEXT_PART] * 1000}] * 70), 400, "input", None),
    ("a long item", RESPONSES, made_from([{"role": "user", "content": "abc " * (3 * MIB)}]), 400, "input", CONTEXT),
    ("2,048 items", RESPONSES, made_from([ITEM] * 2048), 400, None, CONTEXT),
    ("2,048 calls", RESPONSES, made_from([CALL] * 2048), 200, None, None),
    ("as many in a conversation", CONVERSATIONS, {"items": [ITEM] * 2048}, 400, "items", None),
    ("an item's long id", CONVERSATIONS, {"items": [{**ITEM, "type": "message", "id": "m" * 257}]}, 400, "items", None),
    ("an item's longest id", CONVERSATIONS, {"items": [{**ITEM, "type": "message", "id": "m" * 256}]}, 200, None, None),
    ("after nothing", RESPONSES, made_from("x", previous_response_id="resp_no"), 404, "previous_response_id", "not_found"),
    ("in no conversation", RESPONSES, made_from("x", conversation="conv_no"), 404, "conversation", "not_found"),
    ("after and in", RESPONSES, made_from("x", conversation="c", previous_response_id="r"), 400, "conversation", None),
    ("kept and not", RESPONSES, made_from("x", background=True, store=False), 400, "background", None),
    ("a prompt that is kept elsewhere", RESPONSES, made_from("x", prompt={"id": "pmpt_1"}), 400, "prompt", None),
    # Tokens
    ("a text of 15 MB to tokenize", "/tokenize", {"prompt": "abc " * (15 * MIB // 4)}, 400, "prompt", CONTEXT),
    ("tokens that are none", "/detokenize", {"tokens": ["x"] * 200_000}, 400, "tokens", None),
    ("no parameters", GENERATE, tokens(sampling_params=None), 400, "sampling_params", None),
    ("an unknown parameter", GENERATE, sampling(max_tokns=4), 400, "sampling_params", UNKNOWN),
    ("a fixed response", GENERATE, sampling(extra_args={"outrider_fixed_response": [1]}), 400, "sampling_params", None),
    ("arguments that are none", GENERATE, sampling(extra_args=[1]), 400, "sampling_params", None),
    ("long arguments", GENERATE, sampling(extra_args={"a": "x" * 2**17}), 400, "extra_args", None),
    ("many samples", GENERATE, sampling(n=1000), 400, "n", None),
    ("no tokens", GENERATE, tokens(token_ids=[]), 400, "token_ids", None),
    ("a token below zero", GENERATE, tokens(token_ids=[-1]), 400, "token_ids", None),
    ("a token beyond the vocabulary", GENERATE, tokens(token_ids=[10**7]), 400, "prompt", None),
    ("tokens beyond the context", GENERATE, tokens(token_ids=[5] * 100_000), 400, None, CONTEXT),
    ("features of pictures", GENERATE, tokens(features={}), 400, "features", UNKNOWN),
    # Within the bounds
    ("200,000 tokens to detokenize", "/detokenize", {"tokens": [300] * 200_000}, 200, None, None),
    ("512 sequences", COMPLETIONS, completion(prompt=["a"] * 8, n=64, max_tokens=2), 200, None, None),
    ("2,000 messages", CHATS, chat(messages=[{"role": "user", "content": ""}] * 2000), 400, None, CONTEXT),
    ("64 stops", COMPLETIONS, completion(stop=["wxyz"] * 64), 200, None, None),
    ("1,024 tools, not to be called", CHATS, chat(tools=TOOLS, tool_choice="none"), 200, None, None),
    ("a regex that repeats", COMPLETIONS, grammar(regex="((a{0,1000}){0,1000}){0,100000}"), 200, None, None),
    ("a thousand choices", COMPLETIONS, grammar(choice=[f"v{i}" for i in range(1000)]), 200, None, None),
]


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
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    for stalls in attempts(timed):
        with stalls.watched():
            answer = await running.http.request(method, path, content=content, headers=JSON)
            await running.until_idle()
        assert answer.status_code == status, answer.text[:500]
    if status != 200:
        error = answer.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert (error["param"], error["code"]) == (param, code), error
        assert error["message"]
        assert answer.headers["x-request-id"]
        assert MODEL_DIR not in answer.text
        assert len(answer.content) < 2000


def children() -> set[Any]:
    """Processes that were forked from here: those that compile grammars, and others."""
    return {each.pid for each in multiprocessing.active_children()}


async def test_a_grammar_is_given_up_when_its_client_leaves_and_refused_when_it_crashes_its_process(gateway, monkeypatch):
    monkeypatch.setattr(grammar_checks, "CPU_LIMIT_S", 600.0)
    others = children()
    async with running_gateway() as running:
        # Another one each time: what is known is not compiled.
        for number in range(3):
            running.begin(structured_outputs={"json": {**BOMB, "title": f"{number}"}})
        await eventually(lambda: len(children() - others) == grammar_checks.WORKERS)
        processes = children() - others
        await running.leave()
        await eventually(lambda: not processes & children())
        await running.until_idle()
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


async def test_nothing_of_a_request_or_its_answer_is_logged(running, caplog, capfd):
    caplog.set_level("DEBUG")
    body = completion(prompt="tangerine")
    answer = (await running.http.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
    for fields in ({"stream": True}, {"temperature": -1}):
        await running.http.post(COMPLETIONS, json={**body, **fields})
    for pattern in ("tangerine(", "tangerine{0,5}"):
        await running.http.post(COMPLETIONS, json=grammar(regex=pattern))
    ours = [each.getMessage() for each in caplog.records if not each.name.startswith(("httpx", "httpcore", "asyncio"))]
    logged, written = json.dumps(ours), capfd.readouterr()
    assert "tangerine" not in logged + written.out + written.err
    assert answer not in logged


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
        (BATCH, chat(messages=[CHAT["messages"]] * 32, logprobs=True, top_logprobs=20)),
        (GENERATE, {"token_ids": [5], "sampling_params": {"logprobs": 20, "n": 32}}),
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
        assert len(logprobs["content"] if "content" in logprobs else logprobs["top_logprobs"]) == count


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


def held(monkeypatch, serving: Any, name: str) -> tuple[asyncio.Event, list[int]]:
    """Calls of it wait for the gate; with one entry for each that has begun."""
    call, gate, begun = getattr(serving, name), asyncio.Event(), list[int]()

    async def slow(*args):
        begun.append(1)
        await gate.wait()
        return await call(*args)

    monkeypatch.setattr(serving, name, slow)
    return gate, begun


@pytest.mark.parametrize(
    ("path", "body", "serving", "name"),
    [
        ("/tokenize", {"prompt": "x"}, "tokenization", "create_tokenize"),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": CHAT["messages"]}, "messages", "count_tokens"),
        ("/v1/responses/input_tokens", made_from("x"), "renderer", "render_responses"),
    ],
)
async def test_prompts_do_not_wait_for_all_that_is_to_be_tokenized(running, monkeypatch, path, body, serving, name):
    gate, begun = held(monkeypatch, getattr(running.server.gateway.services, serving), name)
    requests = [asyncio.ensure_future(running.http.post(path, json=body)) for _ in range(20)]
    await eventually(lambda: len(begun) == 2)
    assert (await running.http.post(COMPLETIONS, json=COMPLETION)).status_code == 200
    assert len(begun) == 2
    gate.set()
    assert {(await request).status_code for request in requests} == {200}


@pytest.mark.parametrize(("most", "memory"), [(3, 1 << 29), (64, 40_000)])
async def test_what_does_not_generate_is_bounded_too(monkeypatch, most, memory):
    """By number, and by the bytes of its bodies, which wait in memory for a thread."""
    monkeypatch.setattr("gateway.auth.access.MAX_ARRIVING_BYTES", memory)
    async with running_gateway(max_in_flight=most) as running:
        gate, begun = held(monkeypatch, running.server.gateway.services.renderer, "render_responses")
        body = {"model": "demo", "input": "x", "metadata": {str(n): "y" * 500 for n in range(16)}}
        requests = [asyncio.ensure_future(running.http.post("/v1/responses/input_tokens", json=body)) for _ in range(10)]
        await eventually(lambda: len(begun) == 2 and sum(each.done() for each in requests) > 4)
        assert (await running.http.post(COMPLETIONS, json=COMPLETION)).status_code == 200
        gate.set()
        statuses = Counter(answer.status_code for answer in await asyncio.gather(*requests))
        assert statuses[200] + statuses[429] == 10
        assert 3 <= statuses[200] <= 5
        assert (await running.http.post("/v1/responses/input_tokens", json=body)).status_code == 200
