"""Rows put aside while nothing is drafted come out as if they had been computed in the step that sends them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.verifier.postponed import Postponed, Span


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last))


def step(rows_of: dict[str, int], starts: dict[str, int], rejected: int = 0) -> tuple[list[Span], torch.Tensor]:
    """A step over these requests; a row's value names its request and position.  `rejected` rows follow each request's."""
    spans: list[Span] = []
    values: list[list[float]] = []
    for name, rows in rows_of.items():
        spans.append(Span(name, starts[name], len(values), rows, True, tokens))
        values += [[float(ord(name)), float(starts[name] + i)] for i in range(rows)] + [[-1.0, -1.0]] * rejected
    return spans, torch.tensor(values)


def positions(span: Span, hidden: torch.Tensor) -> list[float]:
    rows = hidden[span.offset : span.offset + span.rows]
    assert all(row[0] == float(ord(span.request_id)) for row in rows)
    return [float(row[1]) for row in rows]


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1), st.booleans()), max_size=12))
def test_every_row_of_a_request_that_goes_on_comes_out_once_and_in_order(steps: list[tuple[dict[str, int], bool]]) -> None:
    postponed = Postponed()
    starts = dict.fromkeys("abc", 0)
    sent = dict.fromkeys("abc", 0)
    for rows_of, hurried in [*steps, (dict.fromkeys("abc", 1), True)]:
        spans, hidden = step(rows_of, starts, rejected=1)
        if hurried:
            merged, joined = postponed.with_present(spans, hidden)
            assert [span.request_id for span in merged] == [span.request_id for span in spans]
            assert postponed.rows == 0
            for span in merged:
                name = span.request_id
                assert positions(span, joined) == list(range(span.start, starts[name] + rows_of[name]))
                assert span.start >= sent[name], "nothing comes twice"
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
    assert positions(span, joined) == [0, 1, 2, 3, 4, 5]


def test_what_is_put_aside_survives_the_reuse_of_its_memory() -> None:
    postponed = Postponed()
    spans, hidden = step({"a": 2}, {"a": 0})
    postponed.add(spans, hidden)
    hidden.zero_()
    (span,), joined = postponed.with_present(*step({"a": 1}, {"a": 2}))
    assert positions(span, joined) == [0, 1, 2]
