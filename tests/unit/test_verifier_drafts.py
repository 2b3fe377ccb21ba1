"""The draft bookkeeping under late, duplicate, reordered, stale, lost and invalid answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.verifier.drafts import BREAKER_MISSES, FLOOR_S, DraftBook, RoundTrip
from backend.verifier.pairing import drafter_for

VOCAB = 50
LONGEST_S = 0.25
DRAFTERS = ["d0", "d1"]


class DraftBookMachine(RuleBasedStateMachine):
    """A verifier that steps while an unreliable link delays, duplicates, reorders and loses what drafters answer."""

    def __init__(self) -> None:
        super().__init__()
        self.book = DraftBook(VOCAB, LONGEST_S)
        self.book.set_drafters(DRAFTERS)
        self.now = 100.0
        self.lengths: dict[str, int] = {}
        self.asked: dict[str, tuple[str, int]] = {}
        self.link: list[tuple[str, str, int, list[int]]] = []
        self.next_id = 0

    @rule()
    def new_request(self) -> None:
        self.next_id += 1
        self.lengths[f"r{self.next_id}"] = 5

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), grow=st.integers(1, 5))
    def step(self, data: st.DataObject, grow: int) -> None:
        """A verification ends: the request grew, and its next draft is asked for."""
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        if request_id in self.book.pending:
            return
        self.lengths[request_id] += grow
        drafter_id = drafter_for(request_id, DRAFTERS)
        assert drafter_id is not None
        waits = self.book.expect(request_id, self.lengths[request_id], drafter_id, self.now)
        assert waits != (drafter_id in self.book.down())
        self.asked[request_id] = (drafter_id, self.lengths[request_id])
        self.link.append((drafter_id, request_id, self.lengths[request_id], [1, 2, 3]))

    @precondition(lambda self: self.link)
    @rule(data=st.data(), twice=st.booleans(), shift=st.sampled_from([0, 0, 0, -1, 1]), bad=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool, shift: int, bad: bool) -> None:
        drafter_id, request_id, base_len, tokens = self.link.pop(data.draw(st.integers(0, len(self.link) - 1)))
        for _ in range(2 if twice else 1):
            sent = [VOCAB] if bad else tokens
            self.book.arrived(drafter_id, request_id, base_len + shift, sent, 4, self.now)

    @precondition(lambda self: self.link)
    @rule()
    def lose(self) -> None:
        self.link.pop()

    @rule(seconds=st.floats(0, 0.3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def schedule(self) -> None:
        ready, expired = self.book.collect(self.now)
        for draft in ready:
            assert draft.base_len == self.asked[draft.request_id][1] == self.lengths[draft.request_id]
            assert draft.drafter_id == self.asked[draft.request_id][0]
            assert all(0 <= token < VOCAB for token in draft.tokens)
            assert draft.request_id not in self.book.pending
        assert len({draft.request_id for draft in ready}) == len(ready)
        assert not {draft.request_id for draft in ready} & set(expired)
        again, _ = self.book.collect(self.now)
        assert not again, "a draft comes out once"

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        del self.lengths[request_id]
        self.book.forget(request_id)

    @rule(drafter_id=st.sampled_from(DRAFTERS))
    def drafter_restarts(self, drafter_id: str) -> None:
        self.book.reset_drafter(drafter_id)
        assert drafter_id not in self.book.down()

    @invariant()
    def nothing_is_waited_for_in_vain(self) -> None:
        for request_id, pending in self.book.pending.items():
            assert request_id in self.lengths
            assert pending.base_len == self.lengths[request_id]
            assert pending.deadline <= pending.asked_at + LONGEST_S
        deadline = self.book.next_deadline()
        assert (deadline is None) == (not self.book.pending)


TestDraftBook = DraftBookMachine.TestCase
TestDraftBook.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_silent_drafter_is_soon_not_waited_for_and_comes_back_with_its_first_answer() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(["d0"])
    now = 0.0
    for length in range(BREAKER_MISSES):
        assert book.expect("r", 10 + length, "d0", now)
        now += LONGEST_S
        assert book.collect(now) == ([], ["r"])
    assert book.down() == ["d0"]
    assert not book.expect("r", 20, "d0", now)
    assert book.arrived("d0", "r", 20, [1], 4, now + 0.1).kind == "late"
    assert book.down() == []
    assert book.expect("r", 21, "d0", now + 1)


def test_an_answer_for_a_length_already_left_behind_ends_the_silence_too() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(["d0"])
    for length in range(BREAKER_MISSES):
        book.expect("r", 10 + length, "d0", float(length))
        book.collect(length + LONGEST_S)
    assert book.down() == ["d0"]
    book.expect("r", 20, "d0", 10.0)
    book.expect("r", 21, "d0", 10.005)
    assert book.arrived("d0", "r", 20, [1], 4, 10.007).kind == "late"
    assert book.down() == []


def test_answers_slower_than_the_longest_wait_keep_the_breaker_open() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(["d0"])
    for length in range(BREAKER_MISSES):
        book.expect("r", 10 + length, "d0", float(length))
        book.collect(length + LONGEST_S)
    book.expect("r", 20, "d0", 10.0)
    book.arrived("d0", "r", 20, [1], 4, 10.0 + 2 * LONGEST_S)
    assert book.down() == ["d0"]


def test_one_silent_round_of_many_requests_is_one_miss() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(["d0"])
    for i in range(10):
        book.expect(f"r{i}", 5, "d0", 0.0)
    assert len(book.collect(LONGEST_S)[1]) == 10
    assert book.down() == []


def test_a_removed_drafter_releases_its_requests() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(["d0", "d1"])
    book.expect("a", 5, "d0", 0.0)
    book.expect("b", 5, "d1", 0.0)
    assert book.set_drafters(["d1"]) == ["a"]
    assert list(book.pending) == ["b"]
    assert book.arrived("d0", "a", 5, [1], 4, 0.1).kind == "stale"


def test_more_tokens_than_asked_for_are_cut() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(["d0"])
    book.expect("a", 5, "d0", 0.0)
    book.arrived("d0", "a", 5, [1, 2, 3, 4, 5], 3, 0.1)
    assert book.collect(0.1)[0][0].tokens == [1, 2, 3]


@given(st.lists(st.floats(0.0001, 10), min_size=1, max_size=50))
def test_deadlines_follow_the_round_trip_within_bounds(samples: list[float]) -> None:
    trip = RoundTrip()
    assert trip.deadline_s(LONGEST_S) == LONGEST_S
    for sample in samples:
        trip.observe(sample)
    assert FLOOR_S <= trip.deadline_s(LONGEST_S) <= LONGEST_S


def test_a_steady_round_trip_gives_about_twice_itself() -> None:
    trip = RoundTrip()
    for _ in range(100):
        trip.observe(0.02)
    assert trip.deadline_s(1.0) == pytest.approx(0.04, rel=0.05)


@given(st.text(min_size=1, max_size=20), st.lists(st.sampled_from("abcdef"), min_size=2, unique=True))
def test_only_a_lost_drafters_requests_move(request_id: str, drafters: list[str]) -> None:
    chosen = drafter_for(request_id, sorted(drafters))
    for gone in drafters:
        rest = sorted(set(drafters) - {gone})
        if gone != chosen:
            assert drafter_for(request_id, rest) == chosen


def test_beside_a_prompt_drafts_are_waited_for_as_long_as_that_saves_time() -> None:
    book = DraftBook(VOCAB, LONGEST_S)
    book.set_drafters(DRAFTERS)
    assert book.deadline_beside_prefill(["a", "b"], 0.002, 0.007) is None
    book.expect("a", 5, "d0", 1.000)
    book.expect("b", 5, "d0", 1.001)
    assert book.deadline_beside_prefill(["a", "b"], 0.002, 0.007) == pytest.approx(1.008)
    assert book.deadline_beside_prefill(["a"], 0.002, 0.007) == pytest.approx(1.007)
    assert book.deadline_beside_prefill(["c"], 0.002, 0.007) is None
    assert book.deadline_beside_prefill(["a", "b"], 0.008, 0.007) is None
    assert book.deadline_beside_prefill(["a", "b"], 0.002, 9.0) == book.next_deadline(["a", "b"])
