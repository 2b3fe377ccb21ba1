"""Waiting for drafters under late, duplicate, reordered, stale and lost answers; which drafter serves whom."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.speculation.candidate import Question, Request
from backend.speculation.chances import Rule
from backend.speculation.deadlines import BREAKER_MISSES, FLOOR_S, REMEMBERED, Questions, RoundTrip
from backend.speculation.pairing import Pairing
from tests.support.properties import examples

LONGEST_S = 0.25
DRAFTERS = ["d0", "d1"]


class QuestionsMachine(RuleBasedStateMachine):
    """A verifier that steps while an unreliable link delays, duplicates, reorders and loses what drafters answer."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = Questions(LONGEST_S)
        self.questions.set_drafters(DRAFTERS)
        self.now = 100.0
        self.lengths: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.outstanding: dict[tuple[str, str, int], float] = {}
        """When each question was asked that may be answered yet: drafter, request, length."""
        self.ever: dict[str, list[int]] = {}
        """All lengths asked for."""
        self.misses = dict.fromkeys(DRAFTERS, 0)
        self.silent_since: dict[str, float | None] = dict.fromkeys(DRAFTERS)
        self.link: list[tuple[str, str, int]] = []
        self.next_id = 0
        self.dice = random.Random(3)
        for _ in range(3):
            self.new_request()

    @rule()
    def new_request(self) -> None:
        self.next_id += 1
        name = f"r{self.next_id}"
        self.lengths[name], self.requests[name] = 5, Request(name, Rule.GREEDY, 4)
        self._ask(name)

    @property
    def pending(self) -> dict[str, Question]:
        return {request.id: question for request, question in self.questions.pending.items()}

    def _ask(self, request_id: str) -> None:
        """A verification ended: the request grew, and its next draft is asked for."""
        self.lengths[request_id] += self.dice.randrange(1, 5)
        drafter_id = Pairing(request_id).drafter(dict.fromkeys(DRAFTERS, ""))
        assert drafter_id is not None
        length = self.lengths[request_id]
        self.questions.asked(self.requests[request_id], length, drafter_id, self.now)
        assert (request_id in self.pending) == (self.misses[drafter_id] < BREAKER_MISSES)
        self.outstanding[drafter_id, request_id, length] = self.now
        self.ever.setdefault(request_id, []).append(length)
        if self.silent_since[drafter_id] is None:
            self.silent_since[drafter_id] = self.now
        self.link.append((drafter_id, request_id, length))

    @precondition(lambda self: self.link)
    @rule(
        data=st.data(),
        twice=st.booleans(),
        shift=st.sampled_from([0, 0, 0, -1, 1]),
        other=st.sampled_from([False, False, False, True]),
    )
    def deliver(self, data: st.DataObject, twice: bool, shift: int, other: bool) -> None:
        """An answer, perhaps repeated, perhaps for another length, perhaps from whom nobody asked."""
        drafter_id, request_id, base_len = self.link.pop(data.draw(st.integers(0, len(self.link) - 1)))
        sender = DRAFTERS[DRAFTERS.index(drafter_id) - 1] if other else drafter_id
        for _ in range(2 if twice else 1) if request_id in self.requests else ():
            was_waited_for = request_id in self.pending
            waited_s = self.questions.answered(sender, self.requests[request_id], base_len + shift, self.now)
            asked_at = self.outstanding.get((sender, request_id, base_len + shift))
            if waited_s is None:
                assert (request_id in self.pending) == was_waited_for
                later = [length for length in self.ever.get(request_id, []) if length > base_len + shift]
                assert asked_at is None or len(later) >= REMEMBERED, "forgotten too soon"
                continue
            assert asked_at is not None, "nobody asked"
            del self.outstanding[sender, request_id, base_len + shift]
            assert waited_s == self.now - asked_at
            self.silent_since[sender] = None
            if waited_s <= LONGEST_S:
                self.misses[sender] = 0

    @precondition(lambda self: self.link)
    @rule(most=st.integers(1, 9))
    def lose(self, most: int) -> None:
        del self.link[-most:]

    @rule(seconds=st.sampled_from([0.001, 0.02, LONGEST_S, 0.6]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(goes_on=st.booleans(), seconds=st.sampled_from([0.001, 0.02, LONGEST_S]))
    def step(self, goes_on: bool, seconds: float) -> None:
        self.now += seconds
        before = self.pending
        late = {question.drafter_id for question in before.values() if question.deadline <= self.now}
        for drafter_id, since in self.silent_since.items():
            deadline_s = self.questions._health[drafter_id].round_trip.deadline_s(LONGEST_S)
            if drafter_id in late or (since is not None and self.now >= since + deadline_s):
                late.add(drafter_id)
                self.misses[drafter_id] += 1
                self.silent_since[drafter_id] = None
        expired = self.questions.expire(self.now)
        lost = [
            question
            for question in before.values()
            if question.deadline <= self.now
            or (question.drafter_id in late and self.misses[question.drafter_id] >= BREAKER_MISSES)
        ]
        assert expired == lost
        assert len(before) == len(expired) + len(self.questions.pending)
        assert self.questions.expire(self.now) == []
        if goes_on:
            self.questions.stop_waiting()
            assert not self.questions.pending
        for request_id in sorted(self.lengths.keys() - self.pending.keys()):
            self._ask(request_id)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        del self.lengths[request_id]
        self.questions.stop_waiting([self.requests.pop(request_id)])
        self.outstanding = {key: at for key, at in self.outstanding.items() if key[1] != request_id}

    @rule(drafter_id=st.sampled_from(DRAFTERS))
    def drafter_restarts(self, drafter_id: str) -> None:
        for request_id, question in self.pending.items():
            if question.drafter_id == drafter_id:
                del self.outstanding[drafter_id, request_id, question.base_len]
        self.questions.reset_drafter(drafter_id)
        self.misses[drafter_id], self.silent_since[drafter_id] = 0, None
        assert all(question.drafter_id != drafter_id for question in self.questions.pending.values())

    @invariant()
    def only_what_can_come_is_waited_for(self) -> None:
        for request_id, question in self.pending.items():
            assert question.base_len == self.lengths[request_id]
            assert self.outstanding[question.drafter_id, request_id, question.base_len] == question.asked_at
            assert question.asked_at + FLOOR_S <= question.deadline <= question.asked_at + LONGEST_S
        first = min((question.deadline for question in self.questions.pending.values()), default=None)
        assert self.questions.deadline() == first

    @invariant()
    def breakers_open_by_misses_in_a_row(self) -> None:
        down = [drafter_id for drafter_id, misses in self.misses.items() if misses >= BREAKER_MISSES]
        assert self.questions.down() == sorted(down)
        assert {drafter_id: health.misses for drafter_id, health in self.questions._health.items()} == self.misses
        assert not {question.drafter_id for question in self.questions.pending.values()} & set(down)

    @invariant()
    def little_is_remembered(self) -> None:
        assert all(len(each.overdue) <= REMEMBERED for each in self.requests.values())


TestQuestions = QuestionsMachine.TestCase
TestQuestions.settings = examples(60, stateful_step_count=40)


def test_a_steady_round_trip_gives_about_twice_itself() -> None:
    trip = RoundTrip()
    for _ in range(100):
        trip.observe(0.02)
    assert trip.deadline_s(1.0) == pytest.approx(0.04, rel=0.05)


@given(st.text(min_size=1, max_size=20), st.lists(st.sampled_from("abcdef"), min_size=2, unique=True))
def test_only_a_lost_drafters_requests_move(request_id: str, drafters: list[str]) -> None:
    chosen = Pairing(request_id).drafter(dict.fromkeys(drafters, ""))
    assert chosen in drafters
    for gone in drafters:
        rest = sorted(set(drafters) - {gone})
        if gone != chosen:
            assert Pairing(request_id).drafter(dict.fromkeys(rest, "")) == chosen
    assert Pairing(request_id).drafter({}) is None
