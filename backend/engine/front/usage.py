"""The usage of an answer as OpenAI's clients know it: with all details, also those that vLLM does not count.  Pure."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

_DETAILS = {
    "prompt_tokens_details": ("audio_tokens", "cached_tokens"),
    "completion_tokens_details": (
        "accepted_prediction_tokens",
        "audio_tokens",
        "reasoning_tokens",
        "rejected_prediction_tokens",
    ),
}
_LAST = '"choices":[]'
"""Stands in the chunk with the usage and in no other; in text, its quotes would be escaped."""


def detailed(usage: dict[str, Any]) -> dict[str, Any]:
    """With the details that are missing, each 0."""
    return usage | {name: dict.fromkeys(all_of_it, 0) | (usage.get(name) or {}) for name, all_of_it in _DETAILS.items()}


def last_chunk(text: str) -> str:
    """A stream's last chunk, JSON, with such a usage."""
    chunk = json.loads(text)
    return json.dumps(chunk | {"usage": detailed(chunk["usage"])}, ensure_ascii=False, separators=(",", ":"))


async def streamed(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events of vLLM's stream, the last one with such a usage."""
    try:
        async for chunk in chunks:
            yield f"data: {last_chunk(chunk.removeprefix('data: '))}\n\n" if _LAST in chunk else chunk
    finally:
        await chunks.aclose()
