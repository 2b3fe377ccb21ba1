"""What OpenAI's Python client asks of /v1/responses and /v1/conversations, on a real engine."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.support.checkable import CHOICE, COLOURS, FLAT_NAMED, FLAT_PAINT, TEXT_FORMAT, Paint, paint_of

pytestmark = pytest.mark.engine
ASKED = {"model": "demo", "input": "Which colour?"}


def kinds(events) -> list[str]:
    return [event.type for event in events]


def test_a_choice(client):
    made = client.responses.create(**ASKED, extra_body=CHOICE)
    assert made.output_text in COLOURS
    assert (made.object, made.status, made.model) == ("response", "completed", "demo")
    (message,) = made.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_a_schema(client):
    made = client.responses.create(**ASKED, text=TEXT_FORMAT)
    assert paint_of(made.output_text)
    assert made.text.format.name == "paint"


def test_parse_makes_a_model(client):
    made = client.responses.parse(**ASKED, text_format=Paint)
    assert isinstance(made.output_parsed, Paint)


def test_parse_of_a_tool(client):
    tools = [openai.pydantic_function_tool(Paint)]
    made = client.responses.parse(**ASKED, tools=tools, tool_choice="required")
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls
    assert all(isinstance(call.parsed_arguments, Paint) for call in calls)


def test_messages_of_every_role(client):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Which colour?"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "And now?"},
    ]
    made = client.responses.create(model="demo", input=messages, instructions="Be kind.", extra_body=CHOICE)
    assert made.output_text in COLOURS
    assert made.instructions == "Be kind."


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


def test_the_stream_helper(client):
    with client.responses.stream(**ASKED, extra_body=CHOICE) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text in COLOURS
    assert kinds(events)[-1] == "response.completed"


def test_the_stream_helper_parses(client):
    with client.responses.stream(**ASKED, text_format=Paint) as stream:
        list(stream)
        assert isinstance(stream.get_final_response().output_parsed, Paint)


def test_the_stream_helper_parses_calls(client):
    tools = [openai.pydantic_function_tool(Paint)]
    with client.responses.stream(**ASKED, tools=tools, tool_choice={"type": "function", "name": "Paint"}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (call,) = final.output
    assert isinstance(call.parsed_arguments, Paint)
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments]
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == call.arguments


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


@pytest.mark.parametrize("choice", ["required", FLAT_NAMED], ids=["required", "named"])
def test_a_call(client, choice):
    made = client.responses.create(**ASKED, tools=[FLAT_PAINT], tool_choice=choice, parallel_tool_calls=False)
    (call,) = made.output
    assert (call.type, call.name) == ("function_call", "paint")
    assert paint_of(call.arguments)
    assert call.id != call.call_id


def test_several_calls(client):
    made = client.responses.create(**ASKED, tools=[FLAT_PAINT], tool_choice="required")
    assert {item.type for item in made.output} == {"function_call"}
    assert len({item.call_id for item in made.output}) == len(made.output)


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


def test_outputs_are_inputs(client):
    first = client.responses.create(**ASKED, extra_body=CHOICE)
    items = [{"role": "user", "content": "Which?"}, *first.output, {"role": "user", "content": "Sure?"}]
    assert client.responses.create(model="demo", input=items, extra_body=CHOICE).output_text in COLOURS


def test_a_conversation(client):
    conversation = client.conversations.create(items=[{"role": "user", "content": "Hello."}], metadata={"a": "b"})
    made = client.responses.create(**ASKED, conversation=conversation.id, extra_body=CHOICE)
    assert made.conversation.id == conversation.id
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.role for item in items] == ["user", "user", "assistant"]
    assert items[-1].content[0].text == made.output_text
    one = client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
    assert one.id == items[0].id
    client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id))) == 2
    changed = client.conversations.update(conversation.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_retrieve_and_delete(client):
    made = client.responses.create(**ASKED, extra_body=CHOICE)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_in_the_background(client):
    made = client.responses.create(**ASKED, extra_body=CHOICE, background=True)
    assert made.status in ("queued", "in_progress", "completed")
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert (made.status, made.output_text in COLOURS) == ("completed", True)


def test_a_stream_taken_up_again(client):
    events = list(client.responses.create(**ASKED, extra_body=CHOICE, background=True, stream=True))
    again = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=2))
    assert kinds(again) == kinds(events[3:])


def test_cancelling(client):
    body = {"ignore_eos": True}
    made = client.responses.create(**ASKED, background=True, max_output_tokens=3500, extra_body=body)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_items_in_pages(client):
    messages = [{"role": "user", "content": f"message {i}"} for i in range(5)]
    made = client.responses.create(model="demo", input=messages, extra_body=CHOICE)
    listed = list(client.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == [f"message {i}" for i in range(5)]


def test_a_length(client):
    made = client.responses.create(**ASKED, max_output_tokens=16, extra_body={"ignore_eos": True})
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.usage.output_tokens == 16


def test_logprobs(client):
    made = client.responses.create(**ASKED, extra_body=CHOICE, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = made.output[0].content[0].logprobs
    assert logprobs
    assert all(len(each.top_logprobs) == 2 for each in logprobs)


def test_input_tokens(client):
    counted = client.responses.input_tokens.count(**ASKED)
    made = client.responses.create(**ASKED, extra_body=CHOICE)
    assert counted.input_tokens == made.usage.input_tokens


def test_fields_of_todays_clients(client):
    made = client.responses.create(
        **ASKED,
        extra_body=CHOICE,
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        parallel_tool_calls=True,
        prompt_cache_key="key",
        reasoning={"effort": "low"},
        safety_identifier="someone",
        service_tier="auto",
        text={"verbosity": "low"},
        truncation="disabled",
        user="someone",
    )
    assert made.output_text in COLOURS
    assert made.metadata == {"a": "b"}
    assert made.text.verbosity == "low"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_name_the_field(client, fields, param):
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**{**ASKED, **fields})
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == param


async def test_many_at_once(later):
    made = await asyncio.gather(*(later.responses.create(**ASKED, extra_body=CHOICE) for _ in range(8)))
    assert all(each.output_text in COLOURS for each in made)


async def test_asynchronously(later):
    async with later.responses.stream(**ASKED, text_format=Paint) as stream:
        assert kinds([event async for event in stream])[-1] == "response.completed"
        assert isinstance((await stream.get_final_response()).output_parsed, Paint)
