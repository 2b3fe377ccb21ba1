"""LangChain: ChatOpenAI over chat completions and over responses, OpenAI's text completions, and ChatAnthropic."""

import os

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.support.checkable import CHOICE, COLOURS, SCHEMA, Paint

URL = os.environ["OUTRIDER_URL"]
QUESTION = "Which colour?"


@tool(args_schema=Paint)
def paint(colour: str, coats: int) -> str:
    """Paints."""
    return f"{coats} coats of {colour}"


def chat(**fields):
    return ChatOpenAI(base_url=f"{URL}/v1", api_key="unused", model="demo", max_retries=0, stream_usage=True, **fields)


@pytest.fixture(params=["chat", "responses"])
def model(request):
    """ChatOpenAI, either way; its answers are free."""
    return chat(use_responses_api=request.param == "responses")


def test_stream(model):
    chunks = list(model.model_copy(update={"extra_body": CHOICE}).stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert whole.text in COLOURS
    assert whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("choice", ["any", "required", "paint", True])
def test_bind_tools(model, choice):
    answer = model.bind_tools([paint], tool_choice=choice).invoke(QUESTION)
    assert answer.tool_calls
    assert not answer.invalid_tool_calls
    assert all(call["name"] == "paint" and Paint.model_validate(call["args"]) for call in answer.tool_calls)


def test_streamed_calls_add_up(model):
    chunks = list(model.bind_tools([paint], tool_choice="any").stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert whole.tool_calls
    assert all(call["name"] == "paint" and Paint.model_validate(call["args"]) for call in whole.tool_calls)


def test_a_tool_round_trip(model):
    messages = [HumanMessage(QUESTION)]
    messages.append(model.bind_tools([paint], tool_choice="paint").invoke(messages))
    messages += [paint.invoke(call) for call in messages[-1].tool_calls]
    assert isinstance(messages[-1], ToolMessage)
    after = model.model_copy(update={"extra_body": CHOICE}).bind_tools([paint], tool_choice="none")
    assert after.invoke(messages).text in COLOURS


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Paint, SCHEMA | {"title": "paint", "description": "Paints."}], ids=["model", "dict"])
def test_with_structured_output(model, method, schema):
    answer = model.with_structured_output(schema, method=method).invoke(QUESTION)
    assert Paint.model_validate(answer if isinstance(answer, dict) else answer.model_dump())


def test_responses_that_follow_one_another():
    model = chat(use_responses_api=True, use_previous_response_id=True, extra_body=CHOICE)
    first = model.invoke([HumanMessage(QUESTION)])
    second = model.invoke([HumanMessage(QUESTION), first, HumanMessage("Sure?")])
    assert second.text in COLOURS
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@pytest.fixture
def claude():
    return ChatAnthropic(base_url=URL, api_key="unused", model="demo", max_retries=0, max_tokens=1000)


@pytest.mark.parametrize("choice", ["any", "paint"])
def test_anthropic_bind_tools(claude, choice):
    answer = claude.bind_tools([paint], tool_choice=choice).invoke(QUESTION)
    assert answer.tool_calls
    assert all(Paint.model_validate(call["args"]) for call in answer.tool_calls)


def test_anthropic_stream(claude):
    chunks = list(claude.bind_tools([paint], tool_choice="paint").stream(QUESTION))
    (call,) = sum(chunks[1:], chunks[0]).tool_calls
    assert Paint.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_anthropic_with_structured_output(claude, method):
    assert isinstance(claude.with_structured_output(Paint, method=method).invoke(QUESTION), Paint)
