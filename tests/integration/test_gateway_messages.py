"""Anthropic's messages over HTTP, in front of a fake verifier."""

import pytest
from vllm.v1.engine import FinishReason

from tests.support.checkable import Paint
from tests.support.fake_verifier import saying
from tests.support.running_gateway import heard

HI = {"model": "demo", "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


@pytest.fixture
def running(running):
    running.verifier.behaviour = saying("def f(x):")
    return running


async def test_a_message_is_answered_and_streams_and_its_tokens_are_counted(running):
    messages = running.anthropic.messages
    answer = await messages.create(**HI, system="be brief", metadata={"user_id": "u"})
    assert (answer.content[0].text, answer.stop_reason, answer.role) == ("def f(x):", "end_turn", "assistant")
    counted = await messages.count_tokens(model="demo", messages=HI["messages"], system="be brief")
    assert (counted.input_tokens, answer.usage.output_tokens > 0) == (answer.usage.input_tokens, True)
    assert None not in (await running.http.post("/v1/messages", json=HI)).json()["content"][0].values()
    async with messages.stream(**HI) as stream:
        kinds = [event.type async for event in stream if event.type != "text"]
        final = await stream.get_final_message()
    deltas = ["content_block_delta"] * kinds.count("content_block_delta")
    assert kinds == ["message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].text == "def f(x):"
    assert final.usage.output_tokens > 0
    stopped = await messages.create(**HI, stop_sequences=[*(f"<{n}>" for n in range(63)), "f(x"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("def ", "stop_sequence", "f(x")


@pytest.mark.parametrize(
    ("emitted", "finish", "stop_reason", "arguments"),
    [
        ('{"city": "Rome"}', FinishReason.STOP, "tool_use", {"city": "Rome"}),
        ('{"city": "Ro', FinishReason.LENGTH, "max_tokens", {}),
        # As with parsers whose grammar says nothing of the arguments.
        ('"Rome"', FinishReason.STOP, "tool_use", {}),
        ("5", FinishReason.STOP, "tool_use", {}),
        ('{"city": Rome}', FinishReason.STOP, "tool_use", {}),
    ],
)
async def test_a_call_is_an_answer_also_without_an_object_of_arguments(running, emitted, finish, stop_reason, arguments):
    running.verifier.behaviour = saying(emitted, finish)
    body = {**HI, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    whole = await running.anthropic.messages.create(**body)
    async with running.anthropic.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        (use,) = answer.content
        assert (answer.stop_reason, use.type, use.name, use.input) == (stop_reason, "tool_use", "weather", arguments)


async def test_a_schema_and_models(running):
    running.verifier.behaviour = saying('{"colour": "red", "coats": 1}')
    made = await running.anthropic.messages.parse(**HI, output_format=Paint)
    assert made.parsed_output == Paint(colour="red", coats=1)
    assert "coats" in running.verifier.sequences[-1].request.sampling_params.structured_outputs.json["required"]
    assert [(each.id, each.type) async for each in running.anthropic.models.list()] == [("demo", "model")]


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "nope"}, 404, "not_found_error"),
        ({"messages": 5}, 400, "invalid_request_error"),
        ({"messages": [HI["messages"]]}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_shape(running, fields, status, kind):
    answer = await running.http.post("/v1/messages", json={**HI, **fields})
    assert answer.status_code == status, answer.text
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert "max_completion_tokens" not in answer.json()["error"]["message"]


async def test_an_answer_has_at_most_the_rest_of_the_context(running):
    answer = await running.http.post("/v1/messages", json={**HI, "max_tokens": 10**6})
    assert answer.status_code == 200, answer.text
    request = running.verifier.sequences[-1].request
    context = running.server.gateway.client.model_config.max_model_len
    assert len(request.prompt_token_ids) + request.sampling_params.max_tokens == context


@pytest.mark.parametrize("text", ["x y z " * 3000, "x" * 10**6])
async def test_a_prompt_that_is_too_long_is_called_so(running, text):
    answer = await running.http.post("/v1/messages", json={**HI, "messages": [{"role": "user", "content": text}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


CACHED = {"cache_control": {"type": "ephemeral"}}
CALLED = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False, **CACHED}
BASH = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 64000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I look.", "signature": "5f0c"}, CALLED]},
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": BASH}],
    "metadata": {"user_id": "user_5f0c_account__session_5f0c"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
"""What Claude Code sends."""


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31999}])
async def test_claude_code_is_answered(running, thinking):
    body = {**CLAUDE_CODE, "thinking": thinking}
    events = heard((await running.http.post("/v1/messages?beta=true", json=body)).text)
    assert events[-1]["type"] == "message_stop", events
    assert "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta") == "def f(x):"
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "metadata", "stream")}
    answer = await running.http.post("/v1/messages/count_tokens?beta=true", json=counted)
    assert answer.status_code == 200, answer.text


def result_of(*blocks):
    return [{"type": "tool_result", "tool_use_id": "toolu_1", "content": list(blocks)}]


FOUND = {
    "type": "search_result",
    "title": "Rome",
    "source": "https://rome.example",
    "content": [{"type": "text", "text": "old"}, {"type": "text", "text": "city"}],
}
DOCUMENT = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "old city"}}
NESTED = {"type": "document", "context": "Notes", "source": {"type": "content", "content": FOUND["content"]}}


@pytest.mark.parametrize(
    ("block", "text"),
    [(FOUND, "Rome\nhttps://rome.example\nold\ncity"), (DOCUMENT, "Notes\nold city"), (NESTED, "Notes\nold\ncity")],
)
async def test_what_a_document_says_is_read(running, block, text):
    for content in ([block], result_of(block)):
        answer = await running.http.post("/v1/messages", json={**HI, "messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 200, answer.text
        assert text in running.prompt


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
TOO_LONG = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 10**6}}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"messages": [{"role": "user", "content": [PDF]}]}, "block of the type `document` without text"),
        ({"messages": [{"role": "user", "content": result_of(PDF)}]}, "block of the type `document` without text"),
        ({"messages": [{"role": "user", "content": result_of({"type": "browser_state"})}]}, "type `browser_state`"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "type `server_tool_use`"),
        ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "is not supported"),
        ({"messages": [{"role": "user", "content": [TOO_LONG]}]}, "prompt is too long"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tool of the type `bash_20250124`"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_the_model_would_not_see_is_refused_by_its_type(running, path, fields, part):
    body = {**HI, **fields}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    answer = await running.http.post(path, json=body)
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]
