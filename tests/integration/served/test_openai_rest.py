"""What OpenAI's Python client asks of completions and models, and which exceptions errors become, on a real engine."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.integration.served.conftest import KEY
from tests.support.checkable import CHOICE, COLOURS, QUESTION

pytestmark = pytest.mark.engine


def test_a_choice(client):
    answer = client.completions.create(model="demo", prompt="Which colour?", extra_body=CHOICE)
    assert answer.choices[0].text in COLOURS
    assert (answer.object, answer.choices[0].finish_reason, answer.choices[0].logprobs) == ("text_completion", "stop", None)


def test_several_prompts(client):
    answer = client.completions.create(model="demo", prompt=["one", "two", "three"], extra_body=CHOICE)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.text in COLOURS for choice in answer.choices)


def test_several_prompts_and_n(client):
    answer = client.completions.create(model="demo", prompt=["one", "two"], n=2, extra_body=CHOICE)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_tokens_as_prompts(client):
    ids = client.post("/tokenize", body={"model": "demo", "prompt": "Which colour?"}, cast_to=dict)["tokens"]
    one = client.completions.create(model="demo", prompt=ids, extra_body=CHOICE)
    two = client.completions.create(model="demo", prompt=[ids, ids], extra_body=CHOICE)
    assert one.usage.prompt_tokens == len(ids)
    assert len(two.choices) == 2


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


def test_logprobs(client):
    (choice,) = client.completions.create(model="demo", prompt="def f(", logprobs=3, max_tokens=4).choices
    assert len(choice.logprobs.tokens) == 4
    assert all(len(top) in (3, 4) for top in choice.logprobs.top_logprobs)
    assert "".join(choice.logprobs.tokens) == choice.text


def test_a_stream(client):
    stream = client.completions.create(
        model="demo", prompt="Which?", extra_body=CHOICE, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) in COLOURS
    assert last.usage.completion_tokens > 0


def test_a_stream_of_several_prompts(client):
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="demo", prompt=["one", "two"], extra_body=CHOICE, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(text in COLOURS for text in texts.values())


def test_stop(client):
    body = {"structured_outputs": {"choice": ["one two three"]}}
    answer = client.completions.create(model="demo", prompt="count", extra_body=body, stop="two")
    assert answer.choices[0].text == "one "


def test_suffix_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="demo", prompt="a", suffix="b")


async def test_asynchronously(fleet):
    client = AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=KEY)
    stream = await client.completions.create(model="demo", prompt="Which?", extra_body=CHOICE, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) in COLOURS


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert (caught.value.code, caught.value.param, caught.value.type) == ("model_not_found", "model", "invalid_request_error")
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "alloy", "format": "mp3"}}, "audio"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": QUESTION, **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x = 1\n" * 3000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_bad_stream_request_fails_before_the_stream(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=3, stream=True)


def test_an_unknown_url(client):
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model="demo", prompt="a picture")


def test_a_time_limit_of_the_client(fleet):
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0, timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="demo", prompt="x", max_tokens=3000, extra_body={"ignore_eos": True})


def test_retries_are_for_what_may_pass(fleet):
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=2)
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=QUESTION, extra_body=CHOICE)
    assert raw.retries_taken == 0
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=3)
    assert "x-stainless-retry-count" not in caught.value.request.headers or (
        caught.value.request.headers["x-stainless-retry-count"] == "0"
    )
