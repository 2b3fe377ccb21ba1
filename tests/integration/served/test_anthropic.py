"""What Anthropic's Python client asks of /v1/messages, on a real engine."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.integration.served.conftest import KEY
from tests.support.checkable import COLOURS, QUESTION, SCHEMA, Paint, paint_of
from tests.support.fleet_process import ServedFleet

pytestmark = pytest.mark.engine
ASKED = {"model": "demo", "max_tokens": 1000, "messages": QUESTION}
COLOUR: Any = {"format": {"type": "json_schema", "schema": {"type": "string", "enum": list(COLOURS)}}}
"""`output_config` of an answer that is one of the colours, in quotes: it is JSON."""
TOOL = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA}
ANY = {"type": "any"}
NAMED = {"type": "tool", "name": "paint"}


def colour_of(text):
    return json.loads(text) in COLOURS


@pytest.fixture(scope="module")
def client(fleet: ServedFleet) -> Anthropic:
    return Anthropic(base_url=fleet.url, api_key=KEY, max_retries=0)


def test_a_choice(client):
    made = client.messages.create(**ASKED, output_config=COLOUR)
    (block,) = made.content
    assert (block.type, colour_of(block.text)) == ("text", True)
    assert (made.type, made.role, made.model) == ("message", "assistant", "demo")
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    assert made.usage.input_tokens > 0
    assert made.usage.output_tokens > 0


def test_system_and_blocks(client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Which colour?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
        {"role": "user", "content": "And now?"},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    made = client.messages.create(model="demo", max_tokens=50, messages=messages, system=system, output_config=COLOUR)
    assert colour_of(made.content[0].text)


def test_the_events_of_a_text(client):
    events = list(client.messages.create(**ASKED, output_config=COLOUR, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert colour_of("".join(event.delta.text for event in events if event.type == "content_block_delta"))
    (end,) = (event for event in events if event.type == "message_delta")
    assert end.delta.stop_reason == "end_turn"
    assert end.usage.output_tokens > 0


def test_the_stream_helper(client):
    with client.messages.stream(**ASKED, output_config=COLOUR) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert colour_of(text)
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [ANY, NAMED], ids=["any", "named"])
def test_a_call(client, choice):
    made = client.messages.create(**ASKED, tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    (block,) = made.content
    assert (block.type, block.name, made.stop_reason) == ("tool_use", "paint", "tool_use")
    assert Paint.model_validate(block.input)


@pytest.mark.parametrize("choice", [ANY, NAMED], ids=["any", "named"])
def test_a_streamed_call(client, choice):
    with client.messages.stream(**ASKED, tools=[TOOL], tool_choice=choice) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert all(block.type == "tool_use" and Paint.model_validate(block.input) for block in final.content)
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.content_block.id for event in starts] == [block.id for block in final.content]


def test_a_tool_round_trip(client):
    first = client.messages.create(**ASKED, tools=[TOOL], tool_choice=NAMED)
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "painted"}]}
    messages = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    made = client.messages.create(
        model="demo", max_tokens=50, messages=messages, tools=[TOOL], tool_choice={"type": "none"}, output_config=COLOUR
    )
    assert colour_of(made.content[0].text)


def test_a_schema(client):
    made = client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert paint_of(made.content[0].text)


def test_parse_makes_a_model(client):
    made = client.messages.parse(**ASKED, output_format=Paint)
    assert isinstance(made.parsed_output, Paint)


def test_a_stop_sequence(client):
    form = {"format": {"type": "json_schema", "schema": {"enum": ["one two three"]}}}
    made = client.messages.create(**ASKED, stop_sequences=[" two"], output_config=form)
    assert (made.content[0].text, made.stop_reason, made.stop_sequence) == ('"one', "stop_sequence", " two")


def test_a_length(client):
    made = client.messages.create(model="demo", max_tokens=1, messages=QUESTION, output_config=COLOUR)
    assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 1)


def test_counted_tokens(client):
    made = client.messages.create(**ASKED, output_config=COLOUR)
    assert client.messages.count_tokens(model="demo", messages=QUESTION).input_tokens == made.usage.input_tokens


def test_fields_without_effect(client):
    made = client.messages.create(
        **ASKED,
        output_config=COLOUR,
        metadata={"user_id": "x"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )
    assert colour_of(made.content[0].text)


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.type) == ("demo", "model")
    assert client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"extra_body": {"no_such_field": 1}}, anthropic.BadRequestError),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, anthropic.BadRequestError),
    ],
    ids=["model", "max_tokens", "temperature", "messages", "field", "tool"],
)
def test_errors(client, fields, kind):
    with pytest.raises(kind) as caught:
        client.messages.create(**{**ASKED, **fields})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] in ("invalid_request_error", "not_found_error")


async def test_asynchronously(fleet):
    client = AsyncAnthropic(base_url=fleet.url, api_key=KEY, max_retries=0)
    async with client.messages.stream(**ASKED, output_config=COLOUR) as stream:
        assert colour_of(await stream.get_final_text())
