"""Anthropic's messages over HTTP, in front of a fake verifier."""

import json

import anthropic
import pytest
from vllm.v1.engine import FinishReason

from tests.integration.test_gateway_streams import stall
from tests.support.running_gateway import running_gateway
from tests.support.saying import saying

HI = {"model": "demo", "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


@pytest.fixture
def running(running):
    running.verifier.behaviour = saying("def f(x):")
    return running


def client(running):
    return anthropic.AsyncAnthropic(base_url=running.server.url, api_key="none", max_retries=0)


async def test_a_message_is_answered(running):
    answer = await client(running).messages.create(**HI, system="be brief", metadata={"user_id": "u"})
    assert (answer.content[0].text, answer.stop_reason, answer.role) == ("def f(x):", "end_turn", "assistant")
    assert answer.usage.output_tokens > 0
    assert None not in (await running.http.post("/v1/messages", json=HI)).json()["content"][0].values()


async def test_it_streams(running):
    async with client(running).messages.stream(**HI) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].text == "def f(x):"
    assert final.usage.output_tokens > 0


async def test_tools(running):
    running.verifier.behaviour = saying('{"city": "Rome"}')
    answer = await client(running).messages.create(**HI, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    (use,) = answer.content
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Rome"})
    assert answer.stop_reason == "tool_use"


async def test_a_call_that_was_cut_off_is_still_an_answer(running):
    running.verifier.behaviour = saying('{"city": "Ro', FinishReason.LENGTH)
    answer = await client(running).messages.create(**HI, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert (answer.stop_reason, answer.content[0].input) == ("max_tokens", {})


async def test_tokens_are_counted(running):
    counted = await client(running).messages.count_tokens(model="demo", messages=HI["messages"])
    answer = await client(running).messages.create(**HI)
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "nope"}, 404, "not_found_error"),
        ({"messages": 5}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"mcp_servers": []}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_shape(running, fields, status, kind):
    answer = await running.http.post("/v1/messages", json={**HI, **fields})
    assert answer.status_code == status, answer.text
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert "max_completion_tokens" not in answer.json()["error"]["message"]
    assert running.idle


async def test_an_answer_has_at_most_the_rest_of_the_context(running):
    answer = await running.http.post("/v1/messages", json={**HI, "max_tokens": 10**6})
    assert answer.status_code == 200, answer.text
    asked = running.verifier.sequences[-1].request
    context = running.server.gateway.client.model_config.max_model_len
    assert len(asked.prompt_token_ids) + asked.sampling_params.max_tokens == context


@pytest.mark.parametrize("text", ["x y z " * 3000, "x" * 10**6])
async def test_a_prompt_that_is_too_long_is_called_so(running, text):
    answer = await running.http.post("/v1/messages", json={**HI, "messages": [{"role": "user", "content": text}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


async def test_a_model_that_does_not_think_keeps_to_any_budget(running):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = await running.http.post("/v1/messages", json={**HI, "max_tokens": 2000, "thinking": thinking})
    assert answer.status_code == 200, answer.text
    assert running.verifier.sequences[-1].request.sampling_params.thinking_token_budget is None


async def test_a_lost_verifier_ends_a_stream_with_an_error_event():
    async with running_gateway(queue_wait_s=0.05) as running:
        running.verifier.behaviour = stall
        lines = []
        async with running.http.stream("POST", "/v1/messages", json={**HI, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines += [line] if line else []
                if line.startswith("event: content_block_delta"):
                    running.verifier.kill()
        assert lines[-2] == "event: error"
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "overloaded_error"
        assert running.idle
