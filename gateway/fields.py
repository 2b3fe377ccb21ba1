"""Request fields that vLLM's request models do not know, or must not get, and what this gateway does with each.  Pure.

`docs/api.md` shows these tables; `tests/unit/test_gateway_fields.py` checks that both agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fits = Callable[[Any], bool]


def _anything(value: Any) -> bool:
    return True


def _one_of(*values: Any) -> Fits:
    return lambda value: value in values


def _only_clears(value: Any) -> bool:
    """Whether Anthropic's `context_management` only clears old parts of the prompt.  Without that the prompt is longer."""
    edits = value.get("edits", []) if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(each, dict) and str(each.get("type")).startswith("clear_") for each in edits
    )


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
"""Fields without effect on the answer, each with the values for which that is true.  Other values are refused."""

GENERATING: Mapping[str, Fits] = {**NO_EFFECT, "outrider": _anything, "prediction": _anything}
"""Fields that chat and text completions accept besides vLLM's.  `gateway/asking.py` reads `outrider` and `prediction`."""

RESPONSES_NO_EFFECT: Mapping[str, Fits] = {
    "client_metadata": _anything,
    "context_management": _one_of([]),
    "prompt_cache_options": _anything,
    "prompt_cache_retention": _anything,
    "safety_identifier": _anything,
    "stream_options": _anything,
}
"""Fields of /v1/responses without effect, as in `NO_EFFECT`."""
RESPONDING: Mapping[str, Fits] = {**RESPONSES_NO_EFFECT, "outrider": _anything}

MESSAGES_NO_EFFECT: Mapping[str, Fits] = {
    "cache_control": _anything,
    "context_management": _only_clears,
    "diagnostics": _anything,
    "inference_geo": _anything,
    "service_tier": _one_of("auto", "standard_only"),
    "speed": _one_of("standard"),
}
"""Fields of /v1/messages without effect, as in `NO_EFFECT`."""
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
"""Fields that would change the answer but are not supported, with the end of the error message."""


EMPTY: Mapping[str, Any] = {"suffix": "", "mcp_servers": []}
"""Values that ask for nothing: the field is absent.  Clients send them where a field has a default."""


def without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """`data` without nulls that mean "absent": in its own fields, and in the objects that OpenAI's API defines.

    Objects that clients define (JSON schemas, template arguments) are not changed.  `stream_options` is not changed either:
    without a stream it is an error, even if it asks for nothing.
    """
    kept = {name: value for name, value in data.items() if value is not None and (name not in EMPTY or value != EMPTY[name])}
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
    """An object without its nulls, and without nulls in the objects under the keys `inside`."""
    if not isinstance(value, dict):
        return value
    return {
        name: _dropped(each) if name in inside and isinstance(each, dict) else each
        for name, each in value.items()
        if each is not None
    }
