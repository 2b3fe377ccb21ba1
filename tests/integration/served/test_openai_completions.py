"""What OpenAI's Python client asks of completions, on a real engine."""

from __future__ import annotations

import pytest

from tests.support.checkable import CHOICE, COLOURS

pytestmark = pytest.mark.engine


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
