"""The tables of request fields: what they do, and that the docs say the same."""

from pathlib import Path

import pytest

from gateway.fields import MESSAGES_NO_EFFECT, NO_EFFECT, REFUSED, RESPONSES_NO_EFFECT, without_nulls

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", sorted({*NO_EFFECT, *RESPONSES_NO_EFFECT, *MESSAGES_NO_EFFECT, *REFUSED}))
def test_every_field_is_in_the_docs(name):
    assert f"`{name}`" in DOCS


def test_null_means_absent():
    asked = {
        "model": "demo",
        "temperature": None,
        "stream_options": {"include_usage": None},
        "messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None}],
        "tools": [{"type": "function", "strict": None, "function": {"name": "f", "description": None}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": {}}},
    }
    assert without_nulls(asked) == {
        "model": "demo",
        "stream_options": {"include_usage": None},
        "messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    }


def test_nulls_of_what_clients_define_stay():
    schema = {"type": "object", "properties": {"a": {"enum": [None], "default": None}}}
    asked = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "chat_template_kwargs": {"a": None},
    }
    assert without_nulls(asked) == asked
