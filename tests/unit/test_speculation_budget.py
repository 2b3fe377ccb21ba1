"""A step verifies the draft tokens that pay: the best of all choices of prefixes, and nobody is left behind for it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.speculation.budget import OWED, Fairness, spend, survivals

ROWS = st.lists(st.lists(st.floats(0.01, 0.999), max_size=4).map(survivals), min_size=1, max_size=4)
STEPS = st.lists(st.floats(0, 1), min_size=40, max_size=40)


def curve(rises: list[float], start: float = 1.0) -> list[float]:
    return list(itertools.accumulate(rises, initial=start))


@given(ROWS, STEPS, st.integers(0, 8))
def test_no_other_prefixes_emit_more_per_second(rows: list[list[float]], rises: list[float], prefill: int) -> None:
    """Any curve that never falls, convex or not."""
    times = curve(rises)
    base = len(rows) + prefill
    spent = spend(rows, lambda n: times[n], base)
    rate = (len(rows) + spent.gained) / spent.seconds
    for lengths in itertools.product(*(range(len(row) + 1) for row in rows)):
        gain = sum(sum(row[:n]) for row, n in zip(rows, lengths, strict=True))
        assert (len(rows) + gain) / times[base + sum(lengths)] <= rate * (1 + 1e-9)
    assert spent.tokens == sum(spent.lengths)
    assert spent.gained == pytest.approx(sum(sum(row[:n]) for row, n in zip(rows, spent.lengths, strict=True)))
    assert spent.seconds == times[base + spent.tokens]


@given(ROWS, STEPS)
def test_the_threshold_parts_what_was_taken_from_what_was_not(rows: list[list[float]], rises: list[float]) -> None:
    times = curve(rises)
    spent = spend(rows, lambda n: times[n], len(rows))
    assert 0 <= spent.threshold <= 1
    for row, n in zip(rows, spent.lengths, strict=True):
        assert all(s >= spent.threshold for s in row[:n])
        assert all(s <= spent.threshold for s in row[n:])


@given(ROWS, STEPS, st.lists(st.floats(-8, 8), min_size=4, max_size=4))
def test_who_is_far_behind_gains_from_what_is_spent(rows: list[list[float]], rises: list[float], credits: list[float]) -> None:
    times, base = curve(rises), len(rows)
    spent = spend(rows, lambda n: times[n], base, credits[: len(rows)])
    for row, n, credit in zip(rows, spent.lengths, credits, strict=False):
        if credit < OWED:
            assert 1 + sum(row[:n]) >= spent.seconds / times[base] * (1 - 1e-9)
    assert (base + spent.gained) / spent.seconds >= base / times[base] * (1 - 1e-9)


def test_tokens_that_cost_nothing_are_all_taken_and_dear_ones_are_not() -> None:
    rows = [survivals([0.3] * 4)] * 2
    assert spend(rows, lambda n: 1.0, 2).lengths == [4, 4]
    assert spend(rows, lambda n: float(n), 2).lengths == [0, 0]
    assert spend(rows, lambda n: float(n), 2).threshold == 1.0
    assert spend([], lambda n: 1.0, 5).lengths == []


def test_a_budget_goes_to_those_who_are_likely_to_be_accepted() -> None:
    spent = spend([[0.95, 0.9, 0.85], [0.2, 0.05, 0.01]], lambda n: 1 + 0.2 * n, 2)
    assert spent.lengths == [3, 0]


def test_prefill_beside_it_makes_draft_tokens_cheap() -> None:
    row = [survivals([0.3] * 3)]
    assert spend(row, lambda n: 1 + 0.5 * n, 1).tokens == 0
    assert spend(row, lambda n: 1 + 0.5 * n, 100).tokens > 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.floats(0.02, 0.98), min_size=2, max_size=6))
def test_in_the_long_run_nobody_emits_less_than_by_plain_decoding(seed: int, accepts: list[float]) -> None:
    dice, fairness, steps = random.Random(seed), Fairness(), 600
    ids = [str(i) for i in range(len(accepts))]
    emitted, spent_s = dict.fromkeys(ids, 0), 0.0

    def step_s(n: int) -> float:
        return 1 + 0.15 * n

    for _ in range(steps):
        rows = [survivals([accept] * 4) for accept in accepts]
        spent = spend(rows, step_s, len(ids), fairness.owed(ids))
        spent_s += spent.seconds
        for request_id, accept, n in zip(ids, accepts, spent.lengths, strict=True):
            tokens = 1 + next((j for j in range(n) if dice.random() > accept), n)
            emitted[request_id] += tokens
            fairness.stepped(request_id, tokens, spent.seconds, step_s(len(ids)))
    plain = spent_s / step_s(len(ids))
    assert all(tokens >= 0.93 * plain for tokens in emitted.values())


def test_credits_are_forgotten_with_their_request_and_bounded() -> None:
    fairness = Fairness()
    assert fairness.owed(["a"]) is None
    for _ in range(100):
        fairness.stepped("a", 1, 3.0, 1.0)
        fairness.stepped("b", 9, 1.0, 1.0)
    assert fairness.owed(["a", "b"]) == [-8.0, 8.0]
    assert fairness.owed(["b"]) is None
    fairness.forget("a")
    assert fairness.owed(["a"]) is None
