"""What OpenAI's Python client asks of /v1/responses and /v1/conversations, on a real engine."""

from __future__ import annotations

import json

import pytest

from tests.support.checkable import CHOICE, COLOURS, FLAT_NAMED, FLAT_PAINT, TEXT_FORMAT, paint_of

pytestmark = pytest.mark.engine
ASKED = {"model": "demo", "input": "Which colour?"}


def kinds(events) -> list[str]:
    return [event.type for event in events]


def test_a_schema(client):
    made = client.responses.create(**ASKED, text=TEXT_FORMAT)
    assert paint_of(made.output_text)
    assert made.text.format.name == "paint"


def test_the_events_of_a_text(client):
    events = list(client.responses.create(**ASKED, extra_body=CHOICE, stream=True))
    deltas = kinds(events).count("response.output_text.delta")
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert text in COLOURS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {events[-1].response.output[0].id}
    assert events[0].response.id == events[-1].response.id


@pytest.mark.parametrize("choice", ["required", FLAT_NAMED], ids=["required", "named"])
def test_the_events_of_a_call(client, choice):
    asked = {**ASKED, "tools": [FLAT_PAINT], "tool_choice": choice, "parallel_tool_calls": False}
    events = list(client.responses.create(**asked, stream=True))
    final = events[-1].response
    (call,) = final.output
    assert (call.type, call.name, call.status) == ("function_call", "paint", "completed")
    added = next(event for event in events if event.type == "response.output_item.added")
    done = next(event for event in events if event.type == "response.output_item.done")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert (added.item.type, added.item.name, added.item.call_id) == ("function_call", "paint", call.call_id)
    assert (added.item.id, added.item.arguments) == (call.id, "")
    assert done.item.arguments == arguments == call.arguments
    assert done.item.call_id == call.call_id
    assert paint_of(arguments)


def test_a_tool_round_trip_by_id(client):
    first = client.responses.create(**ASKED, tools=[FLAT_PAINT], tool_choice=FLAT_NAMED)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "painted"}
    second = client.responses.create(
        model="demo", input=[result], previous_response_id=first.id, tools=[FLAT_PAINT], tool_choice="none", extra_body=CHOICE
    )
    assert second.output_text in COLOURS
    assert second.previous_response_id == first.id
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]


def test_a_tool_round_trip_by_items(client):
    first = client.responses.create(**ASKED, tools=[FLAT_PAINT], tool_choice=FLAT_NAMED, store=False)
    items = [{"role": "user", "content": "Which?"}, *first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": json.dumps({"ok": True})})
    second = client.responses.create(model="demo", input=items, tools=[FLAT_PAINT], tool_choice="none", extra_body=CHOICE)
    assert second.output_text in COLOURS


def test_logprobs(client):
    made = client.responses.create(**ASKED, extra_body=CHOICE, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = made.output[0].content[0].logprobs
    assert logprobs
    assert all(len(each.top_logprobs) == 2 for each in logprobs)
