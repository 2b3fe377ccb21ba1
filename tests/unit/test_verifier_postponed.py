"""Rows put aside while nothing is drafted come out as if they had been computed in the step that sends them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.postponed import Postponed, Span, pick_rows


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last))


def step(rows_of: dict[str, int], starts: dict[str, int], rejected: int = 0) -> tuple[list[Span], torch.Tensor]:
    """A step over these requests, and its rows; their values name request and position.  `rejected` rows follow each's."""
    spans: list[Span] = []
    values: list[list[float]] = []
    for name, rows in rows_of.items():
        spans.append(Span(name, starts[name], len(values), rows, tokens))
        values += [[float(ord(name)), float(starts[name] + i)] for i in range(rows)] + [[-1.0, -1.0]] * rejected
    return spans, pick_rows(spans, [torch.tensor(values)])


def positions(spans: list[Span], rows: torch.Tensor) -> list[list[int]]:
    """The positions whose rows each span has."""
    found = []
    for span, part in zip(spans, torch.split(rows, [span.rows for span in spans]), strict=True):
        assert all(row[0] == float(ord(span.request_id)) for row in part)
        found.append([int(row[1]) for row in part])
    return found


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1), st.booleans()), max_size=12))
def test_every_row_of_a_request_that_goes_on_comes_out_once_and_in_order(steps: list[tuple[dict[str, int], bool]]) -> None:
    postponed = Postponed()
    starts = dict.fromkeys("abc", 0)
    sent = dict.fromkeys("abc", 0)
    for rows_of, features_needed in [*steps, (dict.fromkeys("abc", 1), True)]:
        spans, hidden = step(rows_of, starts, rejected=1)
        if features_needed:
            merged, joined = postponed.with_present(spans, hidden)
            assert [span.request_id for span in merged] == [span.request_id for span in spans]
            assert postponed.rows == sum(starts[name] - sent[name] for name in starts if name not in rows_of)
            for span, found in zip(merged, positions(merged, joined), strict=True):
                name = span.request_id
                assert found == list(range(span.start, starts[name] + rows_of[name]))
                assert span.start == sent[name], "nothing comes twice, and nothing is left out"
                sent[name] = span.start + span.rows
        else:
            postponed.add(spans, hidden)
            assert postponed.rows > 0
        for name, rows in rows_of.items():
            starts[name] += rows


def test_rows_computed_anew_after_a_preemption_take_the_place_of_the_old() -> None:
    postponed = Postponed()
    postponed.add(*step({"a": 3}, {"a": 4}))
    postponed.add(*step({"a": 5}, {"a": 0}))
    (span,), joined = postponed.with_present(*step({"a": 1}, {"a": 5}))
    assert (span.start, span.rows) == (0, 6)
    assert positions([span], joined)[0] == [0, 1, 2, 3, 4, 5]


def test_rows_of_requests_that_have_ended_never_go_out_and_do_not_count() -> None:
    postponed = Postponed()
    postponed.add(*step({"a": 3, "b": 2}, {"a": 0, "b": 0}))
    postponed.forget(["b", "stranger"])
    assert postponed.rows == 3
    postponed.add(*step({"a": 1}, {"a": 3}))
    (span,), joined = postponed.with_present(*step({"a": 1}, {"a": 4}))
    assert positions([span], joined)[0] == [0, 1, 2, 3, 4]
    assert len(joined) == 5
    assert postponed.rows == 0


def test_it_is_full_by_rows_of_live_requests_and_by_bytes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.engine.postponed.MOST_ROWS", 4)
    monkeypatch.setattr("backend.engine.postponed.MOST_BYTES", 80)
    postponed = Postponed()
    postponed.add(*step({"a": 4}, {"a": 0}))
    assert postponed.is_full
    postponed.forget(["a"])
    assert not postponed.is_full
    spans, block = step({"b": 6}, {"b": 0})
    postponed.add(spans, block)
    assert postponed._asides["b"].rows[0].data_ptr() == block.data_ptr(), "not copied again"
    postponed.forget(["b"])
    assert postponed.is_full, "eighty bytes are held"
    postponed.with_present(*step({"c": 1}, {"c": 0}))
    assert not postponed.is_full


@pytest.mark.parametrize("rejected", [0, 1])
def test_picked_rows_are_copies_of_all_layers_side_by_side(rejected: int) -> None:
    spans, _ = step({"a": 2, "b": 1}, {"a": 0, "b": 0}, rejected)
    layers = [torch.arange(6.0).view(6, 1), torch.arange(6.0).view(6, 1) + 10]
    picked = pick_rows(spans, layers)
    for layer in layers:
        layer.zero_()  # the runner reuses its memory
    last = 2 + rejected
    assert picked.tolist() == [[0, 10], [1, 11], [last, 10 + last]]
