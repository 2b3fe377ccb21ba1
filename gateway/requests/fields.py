"""Request fields that vLLM's request models do not know, or must not get, and what this gateway does with each.  Pure.

`docs/reference/api.md` shows these tables; `tests/unit/gateway/requests/test_fields.py` checks that both agree.
"""

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
"""Fields that chat and text completions accept besides vLLM's.  `options.py` reads `outrider` and `prediction`."""

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

CLIENTS = frozenset(
    {
        "arguments",
        "chat_template_kwargs",
        "client_metadata",
        "documents",
        "extra_args",
        "input_examples",
        "input_schema",
        "json",
        "json_schema",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "parameters",
        "schema",
        "vllm_xargs",
    }
)
"""Fields whose objects clients define: JSON schemas, arguments of tools and templates.  A null in them is a value."""


def drop_nulls(value: Any) -> None:
    """Takes nulls out of all objects in a body, at any depth: they mean that a field is absent.  Objects of clients stay."""
    below = [value]
    while below:
        each = below.pop()
        if isinstance(each, dict):
            for name in [name for name, inner in each.items() if inner is None]:
                del each[name]
            # The arguments of a tool call of Anthropic's are an object `input`; elsewhere that is a list of items.
            ours = (name for name in each if name not in CLIENTS and not (name == "input" and isinstance(each[name], dict)))
            below.extend(each[name] for name in ours)
        elif isinstance(each, list):
            below.extend(inner for inner in each if isinstance(inner, dict | list))
