"""Sampling parameters as JSON, from a mapping or from vLLM's own objects.  Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

DERIVED = frozenset({"output_kind", "output_text_buffer_length", "skip_clone", "skip_reading_prefix_cache"})
"""Fields that vLLM's `SamplingParams` set themselves."""


def fields_of(sampling_params: object) -> dict[str, Any]:
    """The parameters that were set.  Of an object, these are `max_tokens` and fields that differ from the class's defaults.

    The fleet has vLLM's defaults, except for `max_tokens`: without it, an output may fill the context.
    """
    if sampling_params is None:
        return {}
    if isinstance(sampling_params, Mapping):
        return {name: value for name, value in sampling_params.items() if value is not None}
    plain = _fields(sampling_params)
    try:
        defaults = _fields(type(sampling_params)())
    except TypeError:  # The class requires arguments, so its defaults are not known.
        defaults = {}
    return {
        name: _fields(value) if dataclasses.is_dataclass(value) else value
        for name, value in plain.items()
        if value is not None
        and name not in DERIVED
        and (name == "max_tokens" or name not in defaults or value != defaults[name])
    }


def _fields(given: object) -> dict[str, Any]:
    """Public fields that are not None."""
    names = getattr(given, "__struct_fields__", None) or vars(given)
    values = {name: getattr(given, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in values.items() if value is not None}
