"""Tokenizes short prompts in the event loop: handing them to a thread and back costs more than the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.renderers.hf import HfRenderer, safe_apply_chat_template

SHORT = 2_000
"""Characters; a tokenizer takes less than a millisecond for so many."""
SCALARS = (str, bool, int, float, type(None))


def short_prompts_at_once(renderer: Any) -> None:
    """Makes a vLLM renderer for Hugging Face tokenizers render short prompts at once; other renderers stay unchanged."""
    if not isinstance(renderer, HfRenderer):
        return
    tokenize, template = renderer._tokenize_prompt_async, renderer._apply_chat_template_async
    renderer._tokenize_prompt_async = _unless_long(
        renderer._tokenize_prompt, tokenize, lambda prompt, params: len(prompt["prompt"]) <= SHORT
    )
    renderer._apply_chat_template_async = _unless_long(safe_apply_chat_template, template, _short_chat)


def _unless_long(
    here: Callable[..., Any], elsewhere: Callable[..., Awaitable[Any]], is_short: Callable[..., bool]
) -> Callable[..., Awaitable[Any]]:
    def made(*args: Any, **arguments: Any) -> Awaitable[Any]:
        if not is_short(*args, **arguments):
            return elsewhere(*args, **arguments)
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(here(*args, **arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    return made


def _short_chat(model_config: Any, tokenizer: Any, conversation: list[Any], **arguments: Any) -> bool:
    """Whether a chat has few characters and only scalar values.  A template loops over lists and tools: unbounded work."""
    given = [value for name, value in arguments.items() if name != "chat_template"]
    given += [value for message in conversation for value in message.values()]
    return all(isinstance(value, SCALARS) for value in given) and sum(len(str(value)) for value in given) <= SHORT
