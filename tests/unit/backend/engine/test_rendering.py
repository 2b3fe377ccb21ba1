"""Which prompts become tokens in the event loop, and that they are the tokens a thread makes of them."""

import asyncio
from typing import Any
from unittest import mock

import pytest
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config

from backend.config import Settings
from backend.engine.front.client import SHORT, short_prompts_at_once
from backend.engine.front.config import build_vllm_config
from tests.support.processes import demo_models


@pytest.fixture(scope="module")
def renderer():
    made = renderer_from_config(build_vllm_config(Settings(), demo_models().target_dir))
    yield made
    made.shutdown()


def tokens(renderer: Any, content: str, **arguments: Any) -> list[int]:
    async def render() -> list[int]:
        messages: list[Any] = [{"role": "user", "content": content}]
        params = ChatParams(chat_template_kwargs={"tokenize": False} | arguments)
        _, prompt = await renderer.render_messages_async(messages, params)
        (made,) = await renderer.tokenize_prompts_async([prompt], TokenizeParams(max_total_tokens=None))
        found: list[int] = made["prompt_token_ids"]
        return found

    return asyncio.run(render())


def test_short_prompts_take_no_thread_and_long_ones_do(renderer: Any) -> None:
    short, long = "def f(x):", "x" * (SHORT + 1)
    before = [tokens(renderer, each) for each in (short, long)]
    short_prompts_at_once(renderer)
    with mock.patch.object(renderer._executor, "submit", wraps=renderer._executor.submit) as submit:
        assert tokens(renderer, short) == before[0]
        submit.assert_not_called()
        assert tokens(renderer, long) == before[1]
        assert submit.call_count == 2
        tokens(renderer, short, documents=[{"title": "a", "text": "b"}])
        assert submit.call_count == 3, "a list that came with the request went through the template in the event loop"


def test_an_error_of_a_template_reaches_who_awaits_it(renderer: Any) -> None:
    short_prompts_at_once(renderer)

    async def render() -> None:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        await renderer.render_messages_async(messages, ChatParams(chat_template="{{ raise_exception('no') }}"))

    with pytest.raises(Exception, match="no"):
        asyncio.run(render())
