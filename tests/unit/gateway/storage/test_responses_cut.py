"""Responses that are cut off: what their items and events say."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor

from gateway.storage.responses.events import complete
from gateway.storage.responses.turn import cut_off
from tests.support.properties import examples

TOOLS = ResponsesRequest.model_validate(
    {
        "input": "x",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "function", "name": "run", "parameters": {"type": "object"}}],
    }
).tools


def made(**fields: Any) -> Any:
    """An event of vLLM's."""
    return SimpleNamespace(model_dump=lambda **_: fields)


async def events_of(tool: str, pieces: list[str], status: str) -> list[dict[str, Any]]:
    """The events of a response that says \"Sure.\", then calls a tool with these pieces of arguments."""
    processor = SimpleStreamingEventProcessor(tools=TOOLS)
    deltas = [DeltaMessage(content="Sure.")] + [
        DeltaMessage(tool_calls=[DeltaToolCall(index=0, function=DeltaFunctionCall(name=None if i else tool, arguments=piece))])
        for i, piece in enumerate(["", *pieces])
    ]

    async def events() -> Any:
        yield made(type="response.created", response={"status": "in_progress", "output": []})
        for delta in deltas:
            target, call = processor.resolve_target_state(delta)
            if processor.needs_transition(target, call):
                for each in [*processor.close_current(), *processor.open(target, call)]:
                    yield each
            for each in processor.emit_delta(delta, None):
                yield each
        for each in processor.close_current():
            yield each
        output = [item.model_dump(mode="json") for item in processor.output_items]
        yield made(type="response.completed", response={"status": status, "output": output})

    return [each async for each in complete(events(), dict, held=0)]


def cuts(text: str) -> Any:
    return st.lists(st.integers(0, len(text)), max_size=6).map(
        lambda places: [text[a:b] for a, b in zip([0, *sorted(places)], [*sorted(places), len(text)], strict=True) if a < b]
    )


@given(st.data(), st.sampled_from(["patch", "run"]), st.integers(0, 24))
@examples(60)
async def test_a_cut_call_says_so_and_its_parts_join(data: Any, tool: str, length: int) -> None:
    arguments = '{"input":"Ha\\nb {\\"c"}'
    emitted = arguments[:length]
    events = await events_of(tool, data.draw(cuts(emitted)), "incomplete")
    last = events[-1]
    assert last["type"] == "response.incomplete"
    first, item = last["response"]["output"]
    assert [first, item] == [each["item"] for each in events if each["type"] == "response.output_item.done"]
    whole = length >= len(arguments)
    assert first["status"] == "completed"
    if tool == "run":
        assert (item["status"], item["arguments"]) == ("completed" if whole else "incomplete", emitted)
        return
    joined = "".join(each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta")
    assert (item["input"], item.get("status")) == (joined, None if whole else "incomplete")
    assert 'Ha\nb {"c'.startswith(joined)
    assert [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"] == [joined]


@pytest.mark.parametrize("text", ["*** Begin Patch", "{ return 1; }", "[1]"])
def test_a_custom_input_that_came_whole_stays(text: str) -> None:
    item = {"type": "custom_tool_call", "input": text}
    assert cut_off(item) == item
