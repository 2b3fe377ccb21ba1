"""Rows put aside while nothing is drafted come out as if they had been computed in the step that sends them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.features import FeatureShipper
from backend.engine.postponed import MOST_ROWS, Postponed, RowSpan, pick_rows


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last))


def step(rows_of: dict[str, int], starts: dict[str, int], rejected: int = 0) -> tuple[list[RowSpan], torch.Tensor]:
    """A step over these requests, and its rows; their values name request and position.  `rejected` rows follow each's."""
    spans: list[RowSpan] = []
    values: list[list[float]] = []
    for name, rows in rows_of.items():
        spans.append(RowSpan(name, starts[name], len(values), rows, tokens))
        values += [[float(ord(name)), float(starts[name] + i)] for i in range(rows)] + [[-1.0, -1.0]] * rejected
    return spans, pick_rows(spans, [torch.tensor(values)])


def set_aside(postponed: Postponed, spans: list[RowSpan], rows: torch.Tensor) -> None:
    ids, starts, counts = [span.request_id for span in spans], [span.start for span in spans], [span.rows for span in spans]
    postponed.add(ids, starts, counts, rows)


def positions(spans: list[RowSpan], rows: torch.Tensor) -> list[list[int]]:
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
            set_aside(postponed, spans, hidden)
            assert postponed.rows > 0
        for name, rows in rows_of.items():
            starts[name] += rows


def test_rows_computed_anew_after_a_preemption_take_the_place_of_the_old() -> None:
    postponed = Postponed()
    set_aside(postponed, *step({"a": 3}, {"a": 4}))
    set_aside(postponed, *step({"a": 5}, {"a": 0}))
    (span,), joined = postponed.with_present(*step({"a": 1}, {"a": 5}))
    assert (span.start, span.rows) == (0, 6)
    assert positions([span], joined)[0] == [0, 1, 2, 3, 4, 5]


def test_rows_of_requests_that_have_ended_never_go_out() -> None:
    postponed = Postponed()
    set_aside(postponed, *step({"a": 3, "b": 2, "c": 1}, {"a": 0, "b": 0, "c": 0}))
    postponed.forget(["b", "c", "stranger"])
    set_aside(postponed, *step({"a": 1, "c": 1}, {"a": 3, "c": 0}))
    (span,), joined = postponed.with_present(*step({"a": 1}, {"a": 4}))
    assert positions([span], joined)[0] == [0, 1, 2, 3, 4]
    assert len(joined) == 5
    assert postponed.rows == 1, "what was computed after it had been preempted"
    (span,), joined = postponed.with_present(*step({"c": 1}, {"c": 1}))
    assert positions([span], joined)[0] == [0, 1]
    assert postponed.rows == 0


@given(st.lists(st.integers(1, 2 * MOST_ROWS), min_size=1, max_size=30))
def test_a_step_sends_a_bounded_number_of_rows_besides_its_own(steps: list[int]) -> None:
    sent: list[int] = []

    def project(rows: torch.Tensor) -> torch.Tensor:
        sent.append(len(rows))
        return rows

    shipper = FeatureShipper(lambda head: project)
    shipper.features_needed = False
    at = total = 0
    for count in steps:
        sent[:] = [0]
        if not shipper.set_aside(["r"], [at], [count], [torch.zeros(count, 1)]):
            shipper.ship([RowSpan("r", at, 0, count, tokens)], [torch.zeros(count, 1)])
            assert sent[-1] >= MOST_ROWS, "seldom"
        at, total = at + count, total + sent[-1]
        assert sent[-1] < count + MOST_ROWS
        assert at - total == shipper.postponed.rows < MOST_ROWS, "nothing is left out"


@pytest.mark.parametrize("rejected", [0, 1])
def test_picked_rows_are_copies_of_all_layers_side_by_side(rejected: int) -> None:
    spans, _ = step({"a": 2, "b": 1}, {"a": 0, "b": 0}, rejected)
    layers = [torch.arange(6.0).view(6, 1), torch.arange(6.0).view(6, 1) + 10]
    picked = pick_rows(spans, layers)
    for layer in layers:
        layer.zero_()  # the runner reuses its memory
    last = 2 + rejected
    assert picked.tolist() == [[0, 10], [1, 11], [last, 10 + last]]
