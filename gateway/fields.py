"""Request fields that vLLM's request models do not know, or should not be sent: what each does here.  Pure.

`docs/api.md` shows these tables; `tests/unit/test_gateway_fields.py` holds it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fits = Callable[[Any], bool]


def _anything(value: Any) -> bool:
    return True


def _one_of(*values: Any) -> Fits:
    return lambda value: value in values


NO_EFFECT: Mapping[str, Fits] = {
    "metadata": _anything,
    "modalities": _one_of(["text"]),
    "prompt_cache_key": _anything,
    "prompt_cache_options": _anything,
    "prompt_cache_retention": _anything,
    "safety_identifier": _anything,
    "service_tier": _one_of("auto", "default", "flex", "scale", "priority"),
    "store": _one_of(True, False),
    "verbosity": _one_of("low", "medium", "high"),
    "best_of": _one_of(1),
}
"""Fields without effect, with the values for which that is true: the answer is the same without them.  Others are refused."""

GENERATING: Mapping[str, Fits] = {**NO_EFFECT, "outrider": _anything, "prediction": _anything}
"""What chat and text completions take besides vLLM's fields; `gateway/asking.py` reads the last two, here and below."""

RESPONSES_NO_EFFECT: Mapping[str, Fits] = {
    "context_management": _one_of([]),
    "prompt_cache_options": _anything,
    "prompt_cache_retention": _anything,
    "safety_identifier": _anything,
    "stream_options": _anything,
}
"""The same for /v1/responses."""
RESPONDING: Mapping[str, Fits] = {**RESPONSES_NO_EFFECT, "outrider": _anything}

MESSAGES_NO_EFFECT: Mapping[str, Fits] = {
    "cache_control": _anything,
    "inference_geo": _anything,
    "service_tier": _one_of("auto", "standard_only"),
}
"""The same for /v1/messages."""
MESSAGING: Mapping[str, Fits] = {**MESSAGES_NO_EFFECT, "outrider": _anything}

_GUIDED = "use `structured_outputs` or `response_format`"
_INTERNAL = "it belongs to vLLM's own processes"
REFUSED: Mapping[str, str] = {
    "access_programs": "there are no tools on the server",
    "audio": "answers are text",
    "content_parts": "send token ids",
    "container": "there are no tools on the server",
    "ec_transfer_params": _INTERNAL,
    "features": "send token ids",
    "function_call": "use `tool_choice`",
    "functions": "use `tools`",
    "guided_choice": _GUIDED,
    "guided_decoding_backend": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "image": "answers are text",
    "kv_transfer_params": _INTERNAL,
    "mcp_servers": "there are no tools on the server",
    "mm_payload": _INTERNAL,
    "moderation": "nothing here moderates",
    "return_mm_kwargs": _INTERNAL,
    "routed_experts_prompt_start": _INTERNAL,
    "web_search_options": "there are no tools on the server",
}
"""Fields that would change the answer and cannot, with what to say of them."""


def without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with nulls left out where they mean "absent": its own fields, and those of the objects that OpenAI's API defines.

    What clients define (JSON schemas, template arguments) stays as it is.  So do `stream_options`: without a stream they are
    an error even where they ask for nothing.
    """
    kept = {name: value for name, value in data.items() if value is not None}
    for name in ("reasoning", "text", "thinking", "output_config"):
        if isinstance(kept.get(name), dict):
            kept[name] = _dropped(kept[name])
    for name in ("response_format", "tool_choice"):
        if isinstance(kept.get(name), dict):
            kept[name] = _dropped(kept[name], "json_schema", "function")
    if isinstance(kept.get("text"), dict) and isinstance(kept["text"].get("format"), dict):
        kept["text"] = {**kept["text"], "format": _dropped(kept["text"]["format"])}
    if isinstance(kept.get("tools"), list):
        kept["tools"] = [_dropped(each, "function") for each in kept["tools"]]
    for name in ("messages", "input"):
        if isinstance(kept.get(name), list):
            kept[name] = [_dropped(each) for each in kept[name]]
    return kept


def _dropped(value: Any, *inside: str) -> Any:
    """An object without its nulls, nor those of the objects under the names `inside`."""
    if not isinstance(value, dict):
        return value
    return {
        name: _dropped(each) if name in inside and isinstance(each, dict) else each
        for name, each in value.items()
        if each is not None
    }
