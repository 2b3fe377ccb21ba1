"""A step verifies the draft tokens that pay: the best of all choices of prefixes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.budget import KvBlocks, draft_limits, spend, survivals
from tests.support.speculator import spent_on

ROWS = st.lists(st.lists(st.floats(0.01, 0.999), max_size=4).map(survivals), min_size=1, max_size=4)
STEPS = st.lists(st.floats(0, 1), min_size=40, max_size=40)


def curve(rises: list[float], start: float = 1.0) -> list[float]:
    return list(itertools.accumulate(rises, initial=start))


@given(ROWS, STEPS, st.integers(0, 8))
def test_no_other_prefixes_emit_more_per_second(rows: list[list[float]], rises: list[float], prefill: int) -> None:
    """Any curve that never falls, convex or not."""
    times = curve(rises)
    base = len(rows) + prefill
    spent = spent_on(rows, lambda n: times[n], base)
    rate = (len(rows) + spent.gained) / spent.seconds
    for lengths in itertools.product(*(range(len(row) + 1) for row in rows)):
        gain = sum(sum(row[:n]) for row, n in zip(rows, lengths, strict=True))
        assert (len(rows) + gain) / times[base + sum(lengths)] <= rate * (1 + 1e-9)
    assert spent.tokens == sum(spent.lengths)
    assert spent.gained == pytest.approx(sum(sum(row[:n]) for row, n in zip(rows, spent.lengths, strict=True)))
    assert spent.seconds == times[base + spent.tokens]
    # The threshold parts what was taken from what was not.
    assert 0 <= spent.threshold <= 1
    for row, n in zip(rows, spent.lengths, strict=True):
        assert all(s >= spent.threshold for s in row[:n])
        assert all(s <= spent.threshold for s in row[n:])


def test_what_the_first_draft_token_costs_more_is_no_price_of_the_others() -> None:
    times = [1.0, 1.5, 1.51, 1.52, 1.53]
    spent = spend([[0.3, 0.1]], times)
    assert spent.lengths == [0]
    assert spent.threshold == pytest.approx(0.3), "a drafter goes on below what does not pay by itself"
    assert spend([[]] * 4, times[:2]).lengths == [0] * 4


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=8),
    st.integers(1, 16),
    st.lists(st.sampled_from([4, 16, 24]), min_size=1, max_size=2),
    st.integers(0, 80),
    st.integers(0, 2),
    st.integers(1, 60),
    st.data(),
)
def test_no_draft_takes_room_that_another_request_might_need(
    lengths: list[int], longest: int, sizes: list[int], free: int, behind: int, more: int, data: st.DataObject
) -> None:
    step_tokens = len(lengths) + more
    found = draft_limits(lengths, longest, step_tokens, KvBlocks(free, sizes, behind))
    drafts = [data.draw(st.integers(0, longest if found is None else found[i])) for i in range(len(lengths))]
    assert sum(drafts) + len(lengths) <= step_tokens

    def held(length: int, drafted: int) -> int:
        """Blocks of a request while its last token and so many draft tokens are computed."""
        return sum(-(-(length + drafted + behind) // size) for size in sizes)

    new = sum(held(length, n) - held(length - 1, 0) for length, n in zip(lengths, drafts, strict=True))
    assert (
        new <= free
        or drafts == [0] * len(drafts)
        or all(held(*each) == held(each[0], 0) for each in zip(lengths, drafts, strict=True))
    )


def test_drafts_have_all_the_room_they_want_where_there_is_enough() -> None:
    assert draft_limits([16, 20], 8, 2048, KvBlocks(6, [16])) is None
    assert draft_limits([16, 20], 8, 2048, KvBlocks(3, [16])) == [0, 8]
    assert draft_limits([16, 31], 8, 2048, KvBlocks(3, [16])) == [0, 1]
    assert draft_limits([16, 20], 8, 2048, KvBlocks(6, [16]), others=1, prefill=64) == [0, 8]
    assert draft_limits([16, 20], 8, 12, KvBlocks(60, [16])) == [5, 5]
    assert draft_limits([16, 20], 8, 1, KvBlocks(60, [16])) == [0, 0]
    assert draft_limits([], 8, 2048, KvBlocks(0, [16])) in (None, [])
