"""OpenAI's responses and conversations over HTTP, in front of a fake verifier; responses in the background."""

import asyncio
import json
import sqlite3

import openai
import pytest

from gateway.http.errors import Overloaded
from gateway.requests.limits import MAX_TEXT_PER_TOKEN, MIN_TEXT
from tests.support.checkable import Paint
from tests.support.fake_verifier import FakeVerifier, Sequence, count_up, eventually, gated, saying, silence, stall
from tests.support.running_gateway import Keys, heard, refusal, running_gateway


@pytest.fixture
def running(running):
    running.verifier.behaviour = saying("def f(x):")
    return running


def message(role, text):
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


COMMAND = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}, "required": ["command"]}
NOTE = {"type": "function", "name": "read", "strict": False, "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
CODEX = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "input": [
        message("developer", "be brief"),
        message("user", "list the files"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        message("user", "go on"),
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": COMMAND},
        {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [NOTE]},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": PATCH},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "5f0c",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "5f0c"},
}
"""What Codex sends."""


async def ended(responses, response):
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        response = await responses.retrieve(response.id)
    return response


async def test_a_response_is_made_and_kept(running):
    responses = running.client.responses
    made = await responses.create(model="demo", input="hi", instructions="be brief", metadata={"a": "b"})
    assert (made.output_text, made.status, made.error) == ("def f(x):", "completed", None)
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert (await responses.retrieve(made.id)).model_dump() == made.model_dump()
    (item,) = (await responses.input_items.list(made.id)).data
    assert (item.role, item.content[0].text) == ("user", "hi")
    unkept = await responses.create(model="demo", input="hi", store=False)
    await responses.delete(made.id)
    for each in (made, unkept):
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(each.id)


async def test_what_came_before_is_part_of_the_prompt(running):
    responses = running.client.responses
    first = await responses.create(model="demo", input="one", instructions="quiet")
    running.verifier.behaviour = saying("return 2")
    second = await responses.create(model="demo", input="two", previous_response_id=first.id)
    third = await responses.create(model="demo", input="three", previous_response_id=second.id)
    prompt = running.prompt
    places = [prompt.index(part) for part in ("one", "def f(x):", "two", "return 2", "three")]
    assert places == sorted(places)
    assert "quiet" not in prompt
    assert prompt.count("<|begin|>") == 1
    listed = (await responses.input_items.list(third.id, order="asc")).data
    assert [item.role for item in listed] == ["user", "assistant", "user", "assistant", "user"]
    await responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await responses.create(model="demo", input="four", previous_response_id=third.id)


async def test_items_are_shown_whole_and_references_lead_to_outputs_that_are_kept(running):
    responses = running.client.responses
    items = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    made = await responses.create(model="demo", input=items)
    assert "one\ntwo\nthree" in running.prompt
    listed = [item async for item in responses.input_items.list(made.id, limit=2, order="asc")]
    assert [(item.type, item.content[0].type, item.content[0].text) for item in listed] == [
        ("message", "input_text", "one"),
        ("message", "output_text", "two"),
        ("message", "input_text", "three"),
    ]
    items[1] = {"type": "item_reference", "id": made.output[0].id}
    await responses.create(model="demo", input=items)
    assert "one\ndef f(x):\nthree" in running.prompt
    with pytest.raises(openai.NotFoundError):
        await responses.create(model="demo", input=[{"type": "item_reference", "id": "msg_nowhere"}])


async def test_a_call_shows_what_was_asked_for(running):
    running.verifier.behaviour = saying('[{"name":"paint","parameters":{}}]')
    tools = [
        {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}} for name in ("paint", "stop")
    ]
    for choice in ("required", {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "paint"}]}):
        made = await running.client.responses.create(model="demo", input="hi", tools=tools, tool_choice=choice)
        assert [item.name for item in made.output] == ["paint"]
        assert running.verifier.sequences[-1].request.sampling_params.structured_outputs.json["maxItems"] == 16
        assert made.text.format.type == "text"
        assert [tool.name for tool in made.tools] == ["paint", "stop"]
        assert made.tool_choice == choice or made.tool_choice.model_dump() == choice


async def test_codex_is_answered(running):
    *_, last = heard((await running.http.post("/v1/responses", json=CODEX)).text)
    assert last["type"] == "response.completed", last
    assert [tool["type"] for tool in last["response"]["tools"]] == ["function", "namespace", "custom"]
    assert last["response"]["output"][-1]["content"][0]["text"] == "def f(x):"


async def test_a_cut_answer_is_incomplete(running):
    running.verifier.behaviour = count_up
    async for event in await running.client.responses.create(model="demo", input="hi", max_output_tokens=6, stream=True):
        last = event
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[-1].status == "incomplete"


@pytest.mark.parametrize("background", [False, True])
async def test_an_answer_that_is_aborted_is_incomplete(running, background):
    running.verifier.behaviour = stall
    responses = running.client.responses
    request = asyncio.ensure_future(responses.create(model="demo", input="hi", background=background))
    await eventually(lambda: bool(running.core.sequences) and any(each.emitted for each in running.core.sequences))
    assert (await running.http.post("/abort_requests", json={})).json()["aborted"] == 1
    made = await ended(responses, await request)
    assert (made.status, made.incomplete_details) == ("incomplete", None)
    assert (await responses.retrieve(made.id)).status == "incomplete"


async def test_the_oldest_go_when_there_is_too_much(tmp_path):
    async with running_gateway(state_dir=str(tmp_path), state_mib=4) as running:
        running.verifier.behaviour = saying("ok")
        responses = running.client.responses
        metadata = {str(number): "x" * 500 for number in range(16)}
        made = [await responses.create(model="demo", input="hi", metadata=metadata) for _ in range(150)]
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(made[0].id)
        assert (await responses.retrieve(made[-1].id)).id == made[-1].id


async def test_conversations(running):
    ours = running.client
    made = await ours.conversations.create(
        metadata={"topic": "x"}, items=[{"type": "message", "role": "user", "content": "one"}]
    )
    await ours.responses.create(model="demo", input="two", conversation=made.id)
    prompt = running.prompt
    assert prompt.index("one") < prompt.index("two")
    items = (await ours.conversations.items.list(made.id, order="asc")).data
    assert [item.role for item in items] == ["user", "user", "assistant"]
    assert (await ours.conversations.items.retrieve(items[0].id, conversation_id=made.id)).id == items[0].id
    await ours.conversations.items.delete(items[0].id, conversation_id=made.id)
    assert len((await ours.conversations.items.list(made.id)).data) == 2
    assert (await ours.conversations.update(made.id, metadata={"topic": "y"})).metadata == {"topic": "y"}
    await ours.conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await ours.conversations.retrieve(made.id)


async def test_what_came_before_counts(running):
    limit = max(MIN_TEXT, MAX_TEXT_PER_TOKEN * running.server.gateway.client.model_config.max_model_len)
    long = {"type": "message", "role": "user", "content": "x" * (limit * 2 // 3)}
    conversation = (await running.http.post("/v1/conversations", json={"items": [long]})).json()["id"]
    body = {"model": "demo", "conversation": conversation, "input": "and"}
    assert (await running.http.post("/v1/responses", json=body)).json()["error"]["param"] is None
    added = await running.http.post(f"/v1/conversations/{conversation}/items", json={"items": [long]})
    assert added.status_code == 200
    error = (await running.http.post("/v1/responses", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error["message"].endswith(" What came before it counts.")
    error = (await running.http.post(f"/v1/conversations/{conversation}/items", json={"items": [long] * 2})).json()["error"]
    assert (error["param"], error["code"]) == ("items", "context_length_exceeded")


async def test_truncation_keeps_the_end(running):
    text = "first " + "x y z " * 3000 + "last"
    assert (await running.http.post("/v1/responses", json={"model": "demo", "input": text})).status_code == 400
    for fields in ({}, {"max_output_tokens": 6}):
        body = {"model": "demo", "input": text, "truncation": "auto", **fields}
        answer = await running.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert "first" not in running.prompt
        assert "last" in running.prompt


async def test_structured_answers_parse(running):
    running.verifier.behaviour = saying('{"colour": "red", "coats": 1}')
    parsed = await running.client.responses.parse(model="demo", input="a coat", text_format=Paint)
    assert parsed.output_parsed == Paint(colour="red", coats=1)
    assert "coats" in running.verifier.sequences[0].request.sampling_params.structured_outputs.json["required"]


async def test_without_a_folder_nothing_is_kept():
    async with running_gateway(state_dir="none") as running:
        running.verifier.behaviour = saying("ok")
        made = await running.client.responses.create(model="demo", input="hi")
        assert (made.output_text, made.to_dict()["store"]) == ("ok", False)
        for path in (f"/v1/responses/{made.id}", "/v1/files", "/v1/batches"):
            assert refusal(await running.http.get(path)) == (400, "not_stored")
        answer = await running.http.post("/v1/responses", json={"model": "demo", "input": "x", "background": True})
        assert answer.status_code == 400
        reference = [{"type": "item_reference", "id": "msg_1"}]
        answer = await running.http.post("/v1/responses", json={"model": "demo", "input": reference})
        assert refusal(answer) == (400, "not_stored")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], ""),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "output_text", "text": part, "annotations": []} for part in ("first", "second")], "firstsecond"),
    ],
)
async def test_what_an_assistant_said_is_all_its_parts(running, content, text):
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    body = {"model": "demo", "input": [item, {"role": "user", "content": "go on"}]}
    answer = await running.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert f"{text}" in running.prompt
    assert (await running.http.post("/v1/responses/input_tokens", json=body)).status_code == 200


async def test_in_the_background(running):
    responses = running.client.responses
    begun = await responses.create(model="demo", input="hi", background=True)
    assert begun.status == "queued"
    made = await ended(responses, begun)
    assert (made.status, made.output_text, made.background) == ("completed", "def f(x):", True)
    assert (await responses.cancel(made.id)).status == "completed"
    waiting = await responses.create(model="demo", input="and then", previous_response_id=made.id, background=True)
    assert (await ended(responses, waiting)).status == "completed"


async def test_a_stream_in_the_background_can_be_taken_up_again(running, monkeypatch, caplog):
    responses = running.client.responses
    events = [event async for event in await responses.create(model="demo", input="hi", background=True, stream=True)]
    before = await running.metric("outrider_client_disconnects_total")
    again = [event async for event in await responses.retrieve(events[0].response.id, stream=True, starting_after=3)]
    assert [event.sequence_number for event in again] == [event.sequence_number for event in events[4:]]
    assert again[-1].response.output_text == "def f(x):"
    far = await running.http.get(f"/v1/responses/{events[0].response.id}?stream=true&starting_after={1 << 63}")
    assert far.status_code == 400, far.text
    assert await running.metric("outrider_client_disconnects_total") == before, "whose stream has ended has not left"

    async def fail(response_id, after):
        yield json.dumps({"type": "response.created"})
        raise sqlite3.OperationalError("secret")

    monkeypatch.setattr(running.server.gateway.responses, "follow", fail)
    text = (await running.http.get(f"/v1/responses/{events[0].response.id}?stream=true")).text
    assert "event: error\ndata: " in text
    assert "secret" not in text
    assert "OperationalError" in caplog.text


async def test_cancelling_aborts_at_the_verifier(running):
    running.verifier.behaviour = silence
    responses = running.client.responses
    begun = await responses.create(model="demo", input="hi", background=True)
    await eventually(lambda: bool(running.verifier.sequences))
    before = await running.metric("outrider_client_disconnects_total")
    async with running.http.stream("GET", f"/v1/responses/{begun.id}?stream=true") as followed:
        await anext(followed.aiter_raw())
    while await running.metric("outrider_client_disconnects_total") == before:
        await asyncio.sleep(0.01)
    assert (await responses.cancel(begun.id)).status == "cancelled"
    await asyncio.wait_for(running.verifier.sequences[0].aborted.wait(), 120)
    assert (await responses.retrieve(begun.id)).status == "cancelled"


async def test_any_gateway_of_the_same_folder_cancels(tmp_path):
    async def endless(verifier: FakeVerifier, sequence: Sequence) -> None:
        while not sequence.aborted.is_set():
            sequence.emit([5])
            await asyncio.sleep(0.01)

    async with running_gateway(state_dir=str(tmp_path)) as first, running_gateway(state_dir=str(tmp_path)) as second:
        first.verifier.behaviour = endless
        begun = await first.client.responses.create(model="demo", input="hi", background=True)
        await eventually(lambda: bool(first.verifier.sequences))
        assert (await second.client.responses.cancel(begun.id)).status == "cancelled"
        await asyncio.wait_for(first.verifier.sequences[0].aborted.wait(), 120)
        assert (await first.client.responses.retrieve(begun.id)).status == "cancelled"


async def test_what_is_made_in_the_background_is_charged_from_the_start(tmp_path):
    keys = Keys(tmp_path)
    mine = keys.put("mine", tokens_per_minute=300)
    ask = {"model": "demo", "input": "hi", "background": True, "max_output_tokens": 200}
    async with running_gateway(keys_file=str(keys.file), state_dir=str(tmp_path)) as running:
        gate = asyncio.Event()
        running.verifier.behaviour = gated(gate)
        assert (await running.http.post("/v1/responses", json=ask, headers=mine)).status_code == 200
        assert (await running.http.post("/v1/responses", json=ask, headers=mine)).status_code == 429
        gate.set()
        await eventually(lambda: not running.core.sequences)

        async def left():
            return int((await running.http.get("/v1/models", headers=mine)).headers["x-ratelimit-remaining-tokens"])

        while await left() < 200:
            await asyncio.sleep(0.01)


async def test_a_background_stream_that_fails_at_once_says_so(running, monkeypatch):
    async def fail(*args, **kwargs):
        raise Overloaded

    monkeypatch.setattr(running.core.gate, "enter", fail)
    responses = running.client.responses
    events = [event async for event in await responses.create(model="demo", input="x", background=True, stream=True)]
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    again = await responses.retrieve(events[0].response.id)
    assert (again.status, again.error.code) == ("failed", "server_error")
