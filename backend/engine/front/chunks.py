"""A plain stream's events as bytes, from templates: vLLM's chunk models, serialized once with holes for the values.

Some holes are filled once per stream, the others for each chunk.  Fields, their order, and which are left out follow vLLM.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal

import msgspec
import pydantic
import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponseStreamChoice, ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice, CompletionStreamResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo

Kind = Literal["role", "text", "end"]
"""A choice's first chunk (chats only), its chunks with text, and its last chunk."""

_HOLE = re.compile(r'"<hole (\w+)>"')
to_json = msgspec.json.Encoder().encode


class Template:
    """An event with holes."""

    def __init__(self, chunk: pydantic.BaseModel) -> None:
        # Holes are strings even where the models have numbers or lists, which would cause warnings.
        text = chunk.model_dump_json(exclude_unset=True, warnings=False)
        self._parts = _HOLE.split(f"data: {text}\n\n")

    def fill(self, values: dict[str, Any]) -> bytes:
        """The event with these holes filled.  The result is a format for `%`; remaining holes take `bytes` of JSON."""
        filled = []
        for place, part in enumerate(self._parts):
            if place % 2 and part not in values:
                filled.append(b"%%(%s)b" % part.encode())
            else:
                literal = to_json(values[part]) if place % 2 else part.encode()
                filled.append(literal.replace(b"%", b"%%"))
        return b"".join(filled)


def _hole(name: str) -> Any:
    return f"<hole {name}>"


def _usage(kind: Kind, chat: bool) -> UsageInfo:
    total = "prompt_tokens" if kind == "role" else "total_tokens"
    fields = {"prompt_tokens": _hole("prompt_tokens"), "total_tokens": _hole(total)}
    fields["completion_tokens"] = 0 if kind == "role" else _hole("completion_tokens")
    if chat:
        fields["completion_tokens_details"] = None
    return UsageInfo.model_construct(**fields)


@lru_cache(maxsize=64)
def chat_template(kind: Kind, *, token_ids: bool, usage: bool, fingerprint: str | None, mute: bool = False) -> Template:
    """The template of a chat's chunks; `mute`: without text.

    Holes: id, created, model, index, role, text, finish_reason, stop_reason, and what was asked for.
    """
    delta = {"role": _hole("role"), "content": ""} if kind == "role" else {} if mute else {"content": _hole("text")}
    choice, chunk = _common(kind, "chat.completion.chunk", fingerprint)
    choice["delta"] = DeltaMessage.model_construct(**delta)
    if kind == "role":
        chunk |= {"prompt_token_ids": _hole("prompt_token_ids") if token_ids else None, "prompt_text": None}
    else:
        choice["token_ids"] = _hole("token_ids") if token_ids else None
    if usage:
        chunk["usage"] = _usage(kind, chat=True)
    choices = [ChatCompletionResponseStreamChoice.model_construct(**choice)]
    return Template(ChatCompletionStreamResponse.model_construct(choices=choices, **chunk))


@lru_cache(maxsize=64)
def completion_template(kind: Kind, *, token_ids: bool, usage: bool, fingerprint: str | None) -> Template:
    """The template of a completion's chunks, with a chat's holes.  A choice's first chunk has the prompt's token ids."""
    choice, chunk = _common(kind, "text_completion", fingerprint)
    choice = {"text": _hole("text"), "stop_reason": None, **choice}
    choice["prompt_token_ids"] = _hole("prompt_token_ids") if token_ids else None
    choice["token_ids"] = _hole("token_ids") if token_ids else None
    if usage:
        chunk["usage"] = _usage(kind, chat=False)
    choices = [CompletionResponseStreamChoice.model_construct(**choice)]
    return Template(CompletionStreamResponse.model_construct(choices=choices, **chunk))


def _common(kind: Kind, object_name: str, fingerprint: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the choice and of the chunk around it that chats and completions share."""
    choice = {"index": _hole("index"), "logprobs": None, "finish_reason": None}
    chunk = {"id": _hole("id"), "object": object_name, "created": _hole("created"), "model": _hole("model")}
    if kind == "end":
        choice |= {"finish_reason": _hole("finish_reason"), "stop_reason": _hole("stop_reason")}
        if fingerprint is not None:
            chunk["system_fingerprint"] = fingerprint
    return choice, chunk
