"""What OpenAI's Python client asks of /v1/chat/completions, on a real engine; grammars make the answers checkable."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest

from tests.support.checkable import CHOICE, COLOURS, NAMED, PAINT, QUESTION, RESPONSE_FORMAT, STOP, Paint, paint_of

pytestmark = pytest.mark.engine


def text(answer) -> str:
    return answer.choices[0].message.content


def test_a_choice(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=CHOICE)
    assert text(answer) in COLOURS
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model, answer.choices[0].message.role) == ("chat.completion", "demo", "assistant")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.refusal is None
    assert answer._request_id


def test_a_regex(client):
    body = {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}
    answer = text(client.chat.completions.create(model="demo", messages=QUESTION, extra_body=body))
    assert len(answer) == 6
    assert answer[3] == "-"


def test_a_schema(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, response_format=RESPONSE_FORMAT)
    assert paint_of(text(answer))


def test_json_object(client):
    form = {"type": "json_object"}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, response_format=form, max_tokens=60, temperature=0)
    assert text(answer).lstrip().startswith("{")


def test_parse_makes_a_model(client):
    answer = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Paint)
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_parse_says_that_it_was_cut_off(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Paint, max_completion_tokens=2)


def test_parse_of_a_tool(client):
    tools = [openai.pydantic_function_tool(Paint)]
    answer = client.chat.completions.parse(model="demo", messages=QUESTION, tools=tools, tool_choice="required")
    (call, *_) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint)


def test_a_stream_is_what_the_whole_answer_is(client):
    asked = {"model": "demo", "messages": QUESTION, "extra_body": CHOICE, "temperature": 0}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(client.chat.completions.create(**asked))
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_in_a_stream(client):
    options = {"include_usage": True}
    asked = {"model": "demo", "messages": QUESTION, "extra_body": CHOICE}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_stream_that_is_left_is_closed(client, fleet):
    with client.chat.completions.create(model="demo", messages=QUESTION, stream=True, max_tokens=2000) as stream:
        next(iter(stream))
    assert text(client.chat.completions.create(model="demo", messages=QUESTION, extra_body=CHOICE)) in COLOURS


def test_the_stream_helper_collects_text(client):
    with client.chat.completions.stream(model="demo", messages=QUESTION, extra_body=CHOICE) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert kinds.count("content.done") == 1
    assert [event.content for event in events if event.type == "content.done"] == [text(final)]
    assert text(final) in COLOURS


def test_the_stream_helper_parses(client):
    with client.chat.completions.stream(model="demo", messages=QUESTION, response_format=Paint) as stream:
        done = [event.parsed for event in stream if event.type == "content.done"]
        assert done == [stream.get_final_completion().choices[0].message.parsed]
    assert isinstance(done[0], Paint)


def test_the_stream_helper_parses_tool_calls(client):
    tools = [openai.pydantic_function_tool(Paint)]
    with client.chat.completions.stream(model="demo", messages=QUESTION, tools=tools, tool_choice=NAMED_PAINT) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.name for event in done] == ["Paint"]
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Paint)


NAMED_PAINT = {"type": "function", "function": {"name": "Paint"}}


def test_required(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, tools=[PAINT], tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert {call.function.name for call in calls} == {"paint"}
    assert all(paint_of(call.function.arguments) for call in calls)
    assert len({call.id for call in calls}) == len(calls)


def test_required_of_two(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, tools=[PAINT, STOP], tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        assert call.function.name in ("paint", "stop")
        assert json.loads(call.function.arguments) is not None


def test_named(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, tools=[PAINT, STOP], tool_choice=NAMED)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "paint")
    assert paint_of(call.function.arguments)
    # OpenAI's API says `stop` of a call that was named.
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


def test_one_call_at_a_time(client):
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, tools=[PAINT], tool_choice="required", parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def test_allowed_tools(client):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "paint"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, tools=[PAINT, STOP], tool_choice=choice)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"paint"}


def test_tools_that_are_not_to_be_called(client):
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, tools=[PAINT], tool_choice="none", extra_body=CHOICE
    )
    assert text(answer) in COLOURS
    assert answer.choices[0].message.tool_calls is None


def test_tools_that_may_be_called(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, tools=[PAINT], extra_body=CHOICE)
    assert text(answer) in COLOURS


def test_streamed_calls_add_up(client):
    stream = client.chat.completions.create(model="demo", messages=QUESTION, tools=[PAINT], tool_choice=NAMED, stream=True)
    name, arguments, ids, ends = "", "", set(), []
    for chunk in stream:
        (choice,) = chunk.choices
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            ids |= {call.id} if call.id else set()
    assert (name, len(ids), len(ends)) == ("paint", 1, 1)
    assert paint_of(arguments)


def test_a_tool_round_trip(client):
    asked = {"model": "demo", "tools": [PAINT], "tool_choice": NAMED}
    first = client.chat.completions.create(messages=QUESTION, **asked).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "painted"}
    answer = client.chat.completions.create(
        model="demo", messages=[*QUESTION, first, result], tools=[PAINT], tool_choice="none", extra_body=CHOICE
    )
    assert text(answer) in COLOURS


def test_n(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=CHOICE, n=3, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content in COLOURS for choice in answer.choices)


def test_n_streamed(client):
    stream = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=CHOICE, n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(each in COLOURS for each in texts.values())


def test_logprobs(client):
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, extra_body=CHOICE, logprobs=True, top_logprobs=2, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content).startswith(text(answer))
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in content)
    assert bytes(content[0].bytes).decode() == content[0].token


def test_logprobs_streamed(client):
    stream = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=CHOICE, logprobs=True, stream=True)
    tokens = [each.token for chunk in stream if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert "".join(tokens).startswith(COLOURS)


def test_stop(client):
    body = {"structured_outputs": {"choice": ["one two three"]}}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=body, stop=[" two"])
    assert text(answer) == "one"
    assert answer.choices[0].finish_reason == "stop"


def test_a_length(client):
    asked = {"model": "demo", "messages": QUESTION, "max_completion_tokens": 5}
    answer = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)


def test_a_seed(client):
    asked = {"model": "demo", "messages": QUESTION, "temperature": 1.0, "max_tokens": 30, "seed": 7}
    assert text(client.chat.completions.create(**asked)) == text(client.chat.completions.create(**asked))


def test_logit_bias(client):
    asked = {"model": "demo", "messages": QUESTION, "extra_body": CHOICE, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True)
    token = client.post("/tokenize", body={"model": "demo", "prompt": text(answer), "add_special_tokens": False}, cast_to=dict)
    other = client.chat.completions.create(**asked, logit_bias={str(token["tokens"][0]): -100})
    assert text(other) in COLOURS
    assert text(other) != text(answer)


def test_every_role_and_content_as_parts(client):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Which"}, {"type": "text", "text": "colour?"}], "name": "kim"},
        {"role": "assistant", "content": "red", "refusal": None},
        {"role": "user", "content": "And now?"},
    ]
    assert text(client.chat.completions.create(model="demo", messages=messages, extra_body=CHOICE)) in COLOURS


def test_fields_without_effect(client):
    answer = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        extra_body=CHOICE,
        metadata={"a": "b"},
        modalities=["text"],
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        safety_identifier="someone",
        service_tier="auto",
        store=True,
        user="someone",
        verbosity="low",
    )
    assert text(answer) in COLOURS


def test_penalties(client):
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, extra_body=CHOICE, frequency_penalty=0.5, presence_penalty=-0.5, top_p=0.9
    )
    assert text(answer) in COLOURS


def test_nulls_are_absent(client):
    fields = ("tools", "tool_choice", "stop", "response_format", "n", "logit_bias", "stream_options", "max_tokens", "seed")
    body = CHOICE | dict.fromkeys(fields)
    assert text(client.chat.completions.create(model="demo", messages=QUESTION, extra_body=body)) in COLOURS


def test_raw_answers(client):
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=QUESTION, extra_body=CHOICE, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.http_response.status_code == 200
    assert text(raw.parse()) in COLOURS


def test_a_streamed_raw_answer(client):
    with client.chat.completions.with_streaming_response.create(
        model="demo", messages=QUESTION, extra_body=CHOICE, stream=True
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_many_at_once(later):
    asked = {"model": "demo", "messages": QUESTION, "extra_body": CHOICE}
    answers = await asyncio.gather(*(later.chat.completions.create(**asked) for _ in range(16)))
    assert all(text(answer) in COLOURS for answer in answers)


async def test_an_asynchronous_stream(later):
    stream = await later.chat.completions.create(model="demo", messages=QUESTION, extra_body=CHOICE, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) in COLOURS


async def test_an_asynchronous_stream_helper(later):
    async with later.chat.completions.stream(model="demo", messages=QUESTION, response_format=Paint) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Paint)


async def test_asynchronous_parse(later):
    answer = await later.chat.completions.parse(model="demo", messages=QUESTION, response_format=Paint)
    assert isinstance(answer.choices[0].message.parsed, Paint)


class Wall(pydantic.BaseModel):
    paints: list[Paint] = pydantic.Field(min_length=1, max_length=2)
    gloss: bool
    second: Paint | None


def test_a_nested_schema(client):
    answer = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Wall)
    assert isinstance(answer.choices[0].message.parsed, Wall)
