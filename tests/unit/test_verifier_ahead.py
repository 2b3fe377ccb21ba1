"""Outcomes drafted ahead of time are used only for the verification they were made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.protocol import Block, Outcome
from backend.verifier.ahead import AheadBook, Ended, worth_waiting

BLOCK = Block("r", 10, [1, 2, 3], [Outcome(3, 7, [8, 9]), Outcome(0, 5, [6]), Outcome(1, 4, [4, 4])])


def look_up(block: Block | None, ended: Ended) -> list[int]:
    book = AheadBook()
    if block is not None:
        book.take(block)
    book.ended(ended)
    ((_, tokens),) = book.settle(100)
    return tokens


def test_a_hit_is_the_draft_of_its_outcome() -> None:
    assert look_up(BLOCK, Ended("r", 10, 14, 7)) == [8, 9]
    assert look_up(BLOCK, Ended("r", 10, 11, 5)) == [6]


def test_another_token_count_or_base_is_a_miss() -> None:
    assert look_up(BLOCK, Ended("r", 10, 14, 6)) == []
    assert look_up(BLOCK, Ended("r", 10, 13, 7)) == []
    assert look_up(BLOCK, Ended("r", 11, 15, 7)) == []
    assert look_up(None, Ended("r", 10, 14, 7)) == []


def test_what_is_left_of_a_draft_that_was_verified_in_part_still_fits() -> None:
    assert look_up(BLOCK, Ended("r", 10, 11, 1)) == [2, 3]
    assert look_up(BLOCK, Ended("r", 10, 12, 2)) == [3]


def test_tokens_out_of_vocabulary_are_a_miss() -> None:
    assert look_up(Block("r", 10, [1], [Outcome(1, 7, [100])]), Ended("r", 10, 12, 7)) == []


def test_a_block_is_used_once_and_forgotten_requests_never() -> None:
    book = AheadBook()
    book.take(BLOCK)
    book.ended(Ended("r", 10, 14, 7))
    assert book.has_undecided()
    assert book.settle(100)[0][1] == [8, 9]
    book.ended(Ended("r", 10, 14, 7))
    assert book.settle(100)[0][1] == []
    book.take(BLOCK)
    book.ended(Ended("r", 10, 14, 7))
    book.forget("r")
    assert book.settle(100) == []


def test_the_hit_rate_follows_what_happens() -> None:
    book = AheadBook()
    for _ in range(300):
        book.take(BLOCK)
        book.ended(Ended("r", 10, 14, 7))
        book.settle(100)
    assert book.hit_rate > 0.95


@given(st.integers(0, 30), st.integers(1, 30), st.floats(0.001, 0.1), st.floats(1, 5))
def test_free_drafts_are_always_waited_for(hits: int, misses: int, step_s: float, length: float) -> None:
    if length > 1.001:
        assert worth_waiting(hits, misses, step_s, 0.0, length)
    assert not worth_waiting(hits, misses, step_s, 1000 * step_s, length)
