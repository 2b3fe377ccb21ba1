"""What Anthropic's Python client asks of /v1/messages, on a real engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import Anthropic

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


def test_a_stop_sequence(client):
    form = {"format": {"type": "json_schema", "schema": {"enum": ["one two three"]}}}
    made = client.messages.create(**ASKED, stop_sequences=[" two"], output_config=form)
    assert (made.content[0].text, made.stop_reason, made.stop_sequence) == ('"one', "stop_sequence", " two")


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.type) == ("demo", "model")
    assert client.models.retrieve("demo").id == "demo"
