"""The bounds of requests: what passes, what does not, and that looking is cheap."""

import contextlib
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.http.errors import BadRequest, ContextTooLong, PayloadTooLarge
from gateway.http.protocol import HEAD_TIMEOUT_S, MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL_BYTES
from gateway.requests.limits import (
    FIELDS,
    MAX_STRUCTURE,
    MIN_TEXT,
    Bound,
    check_bounds,
    check_structure,
    check_text,
    count_prompts,
    grammar_field,
)
from tests.support.processes import ROOT
from tests.support.refused import refused

DOCS = ROOT / "docs" / "reference" / "limits.md"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "n", "other"]), VALUES, max_size=6))
def test_nothing_makes_the_check_fail(data):
    for check in (check_bounds, lambda given: check_text(given, 256)):
        with contextlib.suppress(BadRequest):
            check(data)


@pytest.mark.parametrize(("name", "bound"), FIELDS.items())
def test_lists_and_strings_end_where_the_table_says(name: str, bound: Bound) -> None:
    if bound.items is not None:
        assert refused(check_bounds, {name: [1] * (bound.items + 1)}).param == name
        if name not in ("messages", "tokens"):
            check_bounds({name: [1] * bound.items})
    if bound.longest is not None:
        check_bounds({name: ["x" * bound.longest]})
        assert refused(check_bounds, {name: ["x" * (bound.longest + 1)]}).param == name


def test_everything_counts_wherever_it_stands():
    assert "characters" in refused(check_bounds, {"metadata": {"x" * 70_000: 1}}).message
    assert "values" in refused(check_bounds, {"other": [[{"a": [1, 2]}] * 1000] * 10}).message
    assert "levels" in refused(check_bounds, {"other": json.loads("[" * 65 + "]" * 65)}).message
    check_bounds({"other": json.loads("[" * 64 + "]" * 64)})
    check_structure(b"," * MAX_STRUCTURE)
    with pytest.raises(PayloadTooLarge):
        check_structure(b"," * (MAX_STRUCTURE + 1))
    fields: tuple[dict[str, Any], ...] = ({"structured_outputs": {}, "response_format": {"type": "x"}}, {"tools": [1]}, {})
    assert [grammar_field(each) for each in fields] == ["response_format", "tools", "structured_outputs"]

    for name in ("stop", "stop_sequences"):
        check_bounds({name: ["x" * 64] * 64})
        assert "characters" in refused(check_bounds, {name: ["x" * 65] * 64}).message, "many strings are few characters"
    assert [count_prompts(each) for each in ("a", [1, 2], ["a", "b"], [[1], [2], [3]], None, [])] == [1, 1, 2, 3, 1, 1]


@pytest.mark.parametrize("prompt", [[True], [[1], [True]], [1, "a"], [1.5], [None]])
def test_a_prompt_is_text_token_ids_or_a_list_of_either(prompt: list[Any]) -> None:
    assert refused(check_bounds, {"prompt": prompt}).message == "`prompt` must be text, token ids, or a list of either."
    for fits in ([1, 2], ["a", "b"], [[1], [2]]):
        check_bounds({"prompt": fits})


def test_text_is_bounded_by_the_context_each_prompt_by_itself():
    check_text({"prompt": ["x" * MIN_TEXT] * 3}, 256)
    check_text({"prompt": "x" * 800_000}, 100_000)
    picture = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10 * MIN_TEXT}}
    check_text({"messages": [{"role": "user", "content": [picture]}]}, 256)
    for data in ({"prompt": "x" * (MIN_TEXT + 1)}, {"messages": [{"role": "user", "content": "x" * 40_000}] * 2}):
        with pytest.raises(ContextTooLong, match="This model's maximum context length is 256 tokens") as caught:
            check_text(data, 256)
        assert caught.value.param in data


@pytest.mark.parametrize("name", ["input", "documents", "queries", "text_2", "data_1", "items"])
def test_each_text_to_be_embedded_or_scored_counts_by_itself(name: str) -> None:
    check_text({name: ["x" * MIN_TEXT] * 20}, 256)
    check_text({"query": "x", "documents": [{"content": [{"type": "text", "text": "x" * (MIN_TEXT - 99)}]}] * 20}, 256)
    for long in (["x", "x" * (MIN_TEXT + 1)], "x" * (MIN_TEXT + 1)):
        with pytest.raises(ContextTooLong):
            check_text({name: long}, 256)
    # What a chat is given is one prompt.
    with pytest.raises(ContextTooLong):
        check_text({"messages": [], "documents": [{"text": "x" * MIN_TEXT}] * 2}, 256)


def test_the_documentation_has_the_table():
    rows = ["| field | entries | longest string | characters | values |", "|---|---|---|---|---|"]
    for name, bound in [*sorted(FIELDS.items()), ("any other", Bound())]:
        cells = ["" if each is None else f"{each:,}" for each in bound]
        rows.append(f"| {name if name == 'any other' else f'`{name}`'} | {' | '.join(cells)} |")
    text = DOCS.read_text()
    assert "\n".join(rows) + "\n" in text
    for number in (MAX_URL_BYTES, MAX_HEADERS, MAX_HEADER_BYTES, MAX_STRUCTURE, MIN_TEXT):
        assert f"{number:,}" in text
    assert f"{HEAD_TIMEOUT_S:.0f} s" in text
