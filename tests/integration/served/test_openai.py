"""What OpenAI's Python client asks and only a real engine shows: grammars, log probabilities, biases."""

import openai
import pytest

from tests.support.checkable import CHOICE, COLOURS, QUESTION, RESPONSE_FORMAT, Paint, paint_of

pytestmark = pytest.mark.engine


def text(answer) -> str:
    return answer.choices[0].message.content


def test_a_schema(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, response_format=RESPONSE_FORMAT)
    assert paint_of(text(answer))
    form = {"type": "json_object"}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, response_format=form, max_tokens=60, temperature=0)
    assert text(answer).lstrip().startswith("{")


def test_the_stream_helper_parses_tool_calls(client):
    tools = [openai.pydantic_function_tool(Paint)]
    with client.chat.completions.stream(model="demo", messages=QUESTION, tools=tools, tool_choice=NAMED_PAINT) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.name for event in done] == ["Paint"]
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Paint)


NAMED_PAINT = {"type": "function", "function": {"name": "Paint"}}


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


def test_echo_with_logprobs(client):
    answer = client.completions.create(model="demo", prompt="def f(", echo=True, logprobs=1, extra_body=CHOICE)
    (choice,) = answer.choices
    assert choice.text.startswith("def f(")
    assert choice.text.endswith(COLOURS)
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset)


def test_the_prompt_alone(client):
    answer = client.completions.create(model="demo", prompt="def f(", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "def f("
