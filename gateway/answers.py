"""vLLM's answers as clients get them: what is vLLM's own and has nothing to say in this answer stays out."""

from __future__ import annotations

from typing import Any

import pydantic

_SILENT_WHEN_NULL = frozenset(
    {
        "annotations",
        "audio",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "created_cache_tokens",
        "ec_transfer_params",
        "function_call",
        "input_messages",
        "kv_transfer_params",
        "metrics",
        "multimodal_tokens",
        "output_messages",
        "parent",
        "prompt_logprobs",
        "prompt_text",
        "prompt_token_ids",
        "reasoning",
        "routed_experts",
        "stop_reason",
        "token_ids",
        "token_strs",
    }
)
_ANSWERED = ("choices", "message", "prompt_tokens_details", "usage")
"""Where else they stand than at the top."""


def body(answer: pydantic.BaseModel) -> dict[str, Any]:
    """An answer's JSON."""
    return _spoken(answer.model_dump(mode="json", by_alias=True))


def _spoken(value: dict[str, Any]) -> dict[str, Any]:
    kept = {name: each for name, each in value.items() if each is not None or name not in _SILENT_WHEN_NULL}
    for name in _ANSWERED:
        inner = kept.get(name)
        if isinstance(inner, dict):
            kept[name] = _spoken(inner)
        elif isinstance(inner, list):
            kept[name] = [_spoken(each) for each in inner]
    return kept
