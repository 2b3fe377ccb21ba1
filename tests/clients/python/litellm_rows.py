"""LiteLLM, with OpenAI's and Anthropic's APIs behind it."""

import json
import os

import litellm
import pytest

from tests.support.checkable import (
    CHOICE,
    COLOURS,
    FLAT_NAMED,
    FLAT_PAINT,
    NAMED,
    PAINT,
    QUESTION,
    RESPONSE_FORMAT,
    TEXT_FORMAT,
    Paint,
    paint_of,
)

URL = os.environ["OUTRIDER_URL"]
AT = {"api_base": f"{URL}/v1", "api_key": "unused", "num_retries": 0}
REQUEST = {**AT, "messages": QUESTION}


@pytest.fixture(params=["openai/demo", "hosted_vllm/demo"])
def model(request):
    return request.param


def text(answer):
    return answer.choices[0].message.content


def calls_of(answer):
    return answer.choices[0].message.tool_calls


def test_stream(model):
    chunks = list(
        litellm.completion(model=model, **REQUEST, extra_body=CHOICE, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) in COLOURS
    assert text(litellm.stream_chunk_builder(chunks)) in COLOURS


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(model, choice):
    calls = calls_of(litellm.completion(model=model, **REQUEST, tools=[PAINT], tool_choice=choice))
    assert calls
    assert all(paint_of(call.function.arguments) for call in calls)


def test_a_tool_round_trip(model):
    first = litellm.completion(model=model, **REQUEST, tools=[PAINT], tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "painted"}
    body = {**REQUEST, "messages": [*QUESTION, first, result]}
    answer = litellm.completion(model=model, **body, tools=[PAINT], tool_choice="none", extra_body=CHOICE)
    assert text(answer) in COLOURS


@pytest.mark.parametrize("form", [RESPONSE_FORMAT, Paint], ids=["schema", "model"])
def test_response_format(model, form):
    assert paint_of(text(litellm.completion(model=model, **REQUEST, response_format=form)))


async def test_asynchronous_responses_with_a_schema():
    made = await litellm.aresponses(model="openai/demo", input="Which?", **AT, text=TEXT_FORMAT)
    assert paint_of(made.output[0].content[0].text)


def test_responses_with_a_call():
    made = litellm.responses(model="openai/demo", input="Which?", **AT, tools=[FLAT_PAINT], tool_choice=FLAT_NAMED)
    assert paint_of(made.output[0].arguments)


def test_responses_that_follow_one_another():
    first = litellm.responses(model="openai/demo", input="Which?", **AT, extra_body=CHOICE)
    second = litellm.responses(model="openai/demo", input="Sure?", previous_response_id=first.id, **AT, extra_body=CHOICE)
    assert second.output[0].content[0].text in COLOURS


def test_anthropic():
    body = {"model": "anthropic/demo", "messages": QUESTION, "api_base": URL, "api_key": "unused", "max_tokens": 1000}
    calls = calls_of(litellm.completion(**body, tools=[PAINT], tool_choice="required"))
    assert calls
    assert all(Paint.model_validate(json.loads(call.function.arguments)) for call in calls)
    chunks = list(litellm.completion(**body, tools=[PAINT], tool_choice="required", stream=True))
    assert calls_of(litellm.stream_chunk_builder(chunks, messages=QUESTION))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": 3}, litellm.BadRequestError),
        ({"messages": [{"role": "user", "content": "x = 1\n" * 3000}]}, litellm.ContextWindowExceededError),
    ],
    ids=["temperature", "context"],
)
def test_errors(model, fields, kind):
    with pytest.raises(kind):
        litellm.completion(model=model, **{**REQUEST, **fields})
