"""Tool calls without any flag: the demo model is of no known family.  A fake verifier says what a grammar would let through."""

import json
from typing import Any

import openai
import pytest

from tests.support.checkable import FLAT_NAMED, FLAT_PAINT
from tests.support.fake_verifier import saying
from tests.support.running_gateway import running_gateway

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Rome?"}],
    "tools": [WEATHER],
    "max_tokens": 60,
}
TWO = '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "weather", "parameters": {"city": "Oslo"}}]'


async def test_required_means_one_call_or_several(running):
    running.verifier.behaviour = saying(TWO)
    answer = await running.client.chat.completions.create(**QUESTION, tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    assert len({call.id for call in calls}) == 2
    assert answer.choices[0].finish_reason == "tool_calls"
    grammar = running.verifier.sequences[0].request.sampling_params.structured_outputs.json
    assert (grammar["type"], grammar["maxItems"]) == ("array", 16)


async def test_auto_is_taken_and_text_stays_text(running):
    running.verifier.behaviour = saying("It rains.")
    async with running.client.chat.completions.stream(**QUESTION) as stream:
        streamed = await stream.get_final_completion()
    for answer in (streamed, await running.client.chat.completions.create(**QUESTION)):
        assert answer.choices[0].message.content == "It rains."
        assert not answer.choices[0].message.tool_calls
    assert running.verifier.sequences[0].request.sampling_params.structured_outputs is None


async def test_tools_can_be_switched_off():
    async with running_gateway(tool_call_parser="none") as running:
        with pytest.raises(openai.BadRequestError):
            await running.client.chat.completions.create(**QUESTION, tool_choice="required")


async def test_the_events_of_a_call_and_its_result_by_the_responses_id(running):
    running.verifier.behaviour = saying('{"colour": "red", "coats": 1}')
    body = {"model": "demo", "input": "hi", "tools": [FLAT_PAINT], "tool_choice": FLAT_NAMED}
    events = [event async for event in await running.client.responses.create(**body, stream=True)]
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.status, call.id != call.call_id) == ("function_call", "paint", "completed", True)
    (added,) = (event.item for event in events if event.type == "response.output_item.added")
    (done,) = (event.item for event in events if event.type == "response.output_item.done")
    assert (added.name, added.arguments, added.id, added.call_id) == ("paint", "", call.id, call.call_id)
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert done.arguments == arguments == call.arguments == '{"colour": "red", "coats": 1}'
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}
    responses = running.client.responses
    made = await responses.create(model="demo", input=[result], previous_response_id=events[-1].response.id, tools=[FLAT_PAINT])
    listed = (await responses.input_items.list(made.id, order="asc")).data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
