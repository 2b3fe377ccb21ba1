"""Tools as OpenAI's clients ask for them, and how their streams end."""

import json

import pytest

from gateway.requests.tools import callable_tools, only_allowed, split_off_finish
from tests.support.refused import refused

PAINT = {"type": "function", "function": {"name": "paint"}}
STOP = {"type": "function", "function": {"name": "stop"}}
FLAT = [{"type": "function", "name": "paint"}, {"type": "function", "name": "stop"}]


def test_what_is_allowed_in_a_chat_and_in_a_response():
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PAINT]}}
    reduced = only_allowed({"model": "m", "tools": [STOP, PAINT], "tool_choice": choice})
    assert reduced == {"model": "m", "tools": [PAINT], "tool_choice": "required"}
    reduced = only_allowed({"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": FLAT[1:]}})
    assert reduced == {"tools": FLAT[1:], "tool_choice": "auto"}
    for other in (None, "auto", "required", PAINT, {"type": "other"}):
        body = {"tools": [PAINT], "tool_choice": other}
        assert only_allowed(body) is body


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"mode": "none", "tools": FLAT},
        {"mode": "auto", "tools": []},
        {"mode": "auto", "tools": [{"type": "function", "name": "other"}]},
        {"mode": "auto", "tools": [FLAT[0], {"type": "function"}]},
        {"mode": "auto", "tools": ["paint"]},
        {"allowed_tools": 3},
    ],
)
def test_what_cannot_be_allowed(choice):
    body = {"tools": FLAT, "tool_choice": {"type": "allowed_tools", **choice}}
    assert refused(only_allowed, body).param == "tool_choice"


SEARCH = {"type": "web_search", "external_web_access": False}


@pytest.mark.parametrize(
    "offered",
    [
        {"tools": [*FLAT, {"type": "file_search"}]},
        {"tools": [{"type": {}}]},
        {"tools": [SEARCH]},
        {"tools": [*FLAT, SEARCH], "tool_choice": "required"},
        {"tools": [*FLAT, SEARCH], "tool_choice": {"type": "web_search"}},
        {"tools": [*FLAT, SEARCH, {"type": "code_interpreter"}]},
    ],
)
def test_tools_of_the_server_are_refused_and_a_search_where_its_lack_would_tell(offered):
    error = refused(callable_tools, offered)
    assert "no tools on the server" in error.message
    assert error.param == "tools"


def test_a_search_beside_tools_of_the_client_is_left_out_and_the_grammar_of_an_input_becomes_advice():
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert callable_tools({"tools": [SEARCH, *FLAT, {"type": "image_generation"}], **choice}) == {"tools": FLAT, **choice}
    for tools in (FLAT, None):
        assert callable_tools({"tools": tools})["tools"] == tools
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    tool = {"type": "custom", "name": "patch", "description": "Edits files.", "format": grammar}
    (kept,) = callable_tools({"tools": [tool]})["tools"]
    assert kept == {
        **tool,
        "format": {"type": "text"},
        "description": "Edits files.\n\nThe input must match this lark grammar:\nstart: /x+/",
    }
    others = [{"type": "custom", "name": "a", "format": {"type": "text"}}, {**tool, "description": 5}, 5]
    assert callable_tools({"tools": others})["tools"] == others


async def split(*choices):
    events = [f"data: {json.dumps({'id': 'c', 'choices': [choice]}, separators=(',', ':'))}\n\n" for choice in choices]
    written = "".join([await split_off_finish(each) for each in (*events, "data: [DONE]\n\n")])
    return [each.removeprefix("data: ") for each in written.strip().split("\n\n")]


async def test_the_end_of_a_call_comes_apart_and_other_chunks_stay():
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    *chunks, done = await split({"index": 0, "delta": delta, "logprobs": None, "finish_reason": "tool_calls"})
    assert done == "[DONE]"
    assert [json.loads(chunk)["choices"][0] for chunk in chunks] == [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"},
    ]
    text = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
    assert len(await split(text, {"index": 0, "delta": {}, "finish_reason": "tool_calls"})) == 3
