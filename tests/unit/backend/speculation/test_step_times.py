"""One curve tells what steps take, whatever the machine's speed does and however long ago a size was met."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.budget import spend, survivals
from backend.speculation.step_times import DraftTimes, StepTimes
from tests.support.speculator import spent_on

MEASURED = st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 1.0)), min_size=1, max_size=60)


def affine(tokens: float) -> float:
    return 4e-3 + 1e-4 * tokens


def test_an_affine_machine_is_learned_from_noisy_steps() -> None:
    times, dice = StepTimes(), random.Random(1)
    for _ in range(1000):
        tokens = dice.choice((1, 2, 4, 5, 8, 12, 16, 24, 40, 64, 80))
        times.observe(tokens, affine(tokens) * max(dice.gauss(1, 0.1), 0.5))
    for tokens in (1, 3, 6, 10, 20, 50, 80, 160):
        assert times.at(tokens) / times.at(16) == pytest.approx(affine(tokens) / affine(16), rel=0.06)


@given(MEASURED, st.integers(1, 300), st.integers(1, 200), st.integers(0, 300))
def test_a_row_is_what_the_curve_says_of_each(measured: list[tuple[int, float]], first: int, count: int, prefill: int) -> None:
    times = StepTimes()
    for tokens, seconds in measured:
        times.observe(tokens, seconds)
    times.observe(first, 0.3, drafted=1)
    row = times.row(first, count, prefill)
    assert row == pytest.approx([times.at(first, n, prefill=prefill) for n in range(count)])
    assert row[0] == times.at(first), "a prompt's own time is not counted"
    differences = [times.at(first + prefill, n) - times.at(first + prefill, 1) for n in range(1, count)]
    assert np.subtract(row[1:], row[1:2]) == pytest.approx(differences, abs=1e-9)


def test_steps_of_long_ago_keep_their_relation_to_the_present_ones() -> None:
    times = StepTimes()
    for tokens in (4, 16, 64) * 30:
        times.observe(tokens, affine(tokens))
    for _ in range(200):
        times.observe(16, 1.3 * affine(16))
    assert times.at(16) == pytest.approx(1.3 * affine(16), rel=0.03)
    assert times.at(64) / times.at(16) == pytest.approx(affine(64) / affine(16), rel=0.05)
    assert times.at(4) / times.at(16) == pytest.approx(affine(4) / affine(16), rel=0.05)


def test_a_hiccup_moves_it_little() -> None:
    times = StepTimes()
    for tokens in (4, 16, 64) * 10:
        times.observe(tokens, affine(tokens))
    before = [times.at(tokens) for tokens in (4, 16, 64)]
    times.observe(16, 3 * affine(16))
    after = [times.at(tokens) for tokens in (4, 16, 64)]
    assert all(new < 1.15 * old for new, old in zip(after, before, strict=True))
    assert after[1] / after[0] < 1.03 * before[1] / before[0]


@pytest.mark.parametrize(("times_slow", "soon"), [(1, 0), (6, 0), (12, 1200)])
def test_a_size_that_was_slow_at_first_is_tried_again(times_slow: int, soon: int) -> None:
    """The machine was busy while one size was measured; that size pays."""
    times, rows = StepTimes(), [survivals([0.85] * 8)] * 4
    for tokens in (1, 4, 16, 64, 9, 36, 144, 576):
        for _ in range(times_slow if tokens == 36 else 6):
            times.observe(tokens, affine(tokens) * (3 if tokens == 36 else 1))
    assert spent_on(rows, affine, 4).tokens == 32
    assert spent_on(rows, times.at, 4).tokens < 28 or not soon
    for _ in range(soon):
        tokens = 4 + spent_on(rows, times.at, 4).tokens
        times.observe(tokens, affine(tokens))
    assert spent_on(rows, times.at, 4).tokens >= 28, "as good as 32 tokens within 0.1 %"


def test_a_size_that_is_slow_is_tried_now_and_then_only() -> None:
    def step_s(tokens: int) -> float:
        return affine(tokens) * (3 if tokens > 24 else 1)

    times, rows, dear = StepTimes(), [survivals([0.85] * 8)] * 4, 0
    for tokens in (1, 4, 16, 64, 9, 36, 144, 576) * 6:
        times.observe(tokens, step_s(tokens))
    for _ in range(2000):
        tokens = 4 + spent_on(rows, times.at, 4).tokens
        times.observe(tokens, step_s(tokens))
        dear += tokens > 24
    assert dear < 40


def test_what_verifying_any_draft_costs_is_learned_apart_from_its_tokens() -> None:
    times, dice, rows = StepTimes(), random.Random(2), [survivals([0.95])] * 32

    def run(steps: int, drafted: int, cost: float) -> None:
        for _ in range(steps):
            tokens = dice.randrange(16, 33) + drafted
            times.observe(tokens, affine(tokens) * dice.gauss(1, 0.05) * (cost if drafted else 1), drafted)

    for _ in range(40):
        run(5, 0, 1.2)
        run(5, dice.randrange(1, 9), 1.2)
    assert times.at(32, 1) / times.at(32) == pytest.approx(1.2, rel=0.05)
    assert times.at(32, 0.5) / times.at(32) == pytest.approx(1.1, rel=0.05)
    assert times.at(32, 8) / times.at(32, 1) == pytest.approx(affine(40) / affine(33), rel=0.05)
    # A few likely tokens pay their own time, and not that cost; many do.
    assert spend([survivals([0.9])] + [[]] * 31, times.row(32, 3)).tokens == 0
    assert spend(rows, times.row(32, 34)).tokens == 32
    times.doubt()
    run(1, 0, 1.2)
    assert times.at(32, 1) / times.at(32) == pytest.approx(1.2, rel=0.05), "a pause does not make drafts look cheap"


def test_a_cost_of_verifying_that_was_learned_on_a_busy_machine_is_doubted_in_time() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(4, affine(4))
    for _ in range(3):
        times.observe(8, 3 * affine(8), drafted=4)
    for tokens in (8, 4, 8):
        times.observe(tokens, 3 * affine(tokens), drafted=tokens // 2)
    seen = times.at(4, 1) / times.at(5)
    assert seen > 1.02
    for _ in range(5000):
        times.observe(4, affine(4))
    assert 1 < times.at(4, 1) / times.at(5) < 1 + 0.6 * (seen - 1)


def test_noise_between_near_points_makes_no_slope() -> None:
    """Where all steps take as long, more tokens must seem to cost next to nothing."""
    rises = []
    for seed in range(20):
        times, dice = StepTimes(), random.Random(seed)
        for _ in range(200):
            times.observe(dice.choice((16, 23, 32, 45, 64, 90)), 6e-3 * dice.gauss(1, 0.1))
        rises.append(times.at(64) / times.at(16) - 1)
    assert statistics.mean(rises) < 0.06
    assert max(rises) < 0.15


@given(MEASURED)
def test_it_never_falls_and_beyond_the_points_grows_in_proportion_at_most(measured: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for tokens, seconds in measured:
        times.observe(tokens, seconds)
    found = [times.at(tokens) for tokens in range(0, 2500, 7)]
    assert all(math.isfinite(t) and t >= 0 for t in found)
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(found))
    assert times.at(1) > 0
    most = max(tokens for tokens, _ in measured)
    assert times.at(3 * most) <= 3 * times.at(most) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_what_asking_costs_is_told_from_a_slow_machine(seed: int) -> None:
    """Steps are a fifth longer while drafters are asked.  Each kind is still known after a long time of the other."""
    times, dice = StepTimes(), random.Random(seed)

    def run(count: int, asking: bool) -> None:
        times.asking = asking
        for _ in range(count):
            tokens = dice.choice((16, 18, 22, 26, 30, 36) if asking else (14, 15, 16, 18, 22))
            times.observe(tokens, affine(tokens) * (1.2 if asking else 1.0) * dice.gauss(1, 0.1))

    for _ in range(4):
        run(124, False)
        run(2, True)
    run(2000, True)
    assert times.at(16, asking=False) == pytest.approx(affine(16), rel=0.12)
    run(500, False)
    assert times.at(32, asking=True) == pytest.approx(1.2 * affine(32), rel=0.12)


def test_one_size_alone_makes_others_neither_free_nor_in_proportion() -> None:
    times = StepTimes()
    times.observe(16, 8e-3)
    assert 0.5 * times.at(16) < times.at(1) < 0.9 * times.at(16)
    assert 1.1 * times.at(16) < times.at(32) < 1.6 * times.at(16)


def test_drafts_take_a_pass_per_token_and_the_way_and_one_more_pass_ahead() -> None:
    times, dice = DraftTimes(), random.Random(1)
    assert times.at(0, 4) == 0.0
    for _ in range(300):
        rows, k = dice.choice((1, 4, 16)), dice.choice((1, 2, 4))
        computed = k * (1e-3 + 2e-5 * rows) * dice.gauss(1, 0.05)
        times.observe(rows, k, computed, computed + 5e-4)
        times.enumerated(rows, k, 1.2 * (k + 1) * (1e-3 + 2e-5 * rows) * dice.gauss(1, 0.05))
    assert times.at(8, 3) == pytest.approx(3 * (1e-3 + 2e-5 * 8) + 5e-4, rel=0.05)
    assert times.ahead(8, 3) == pytest.approx(1.2 * 4 * (1e-3 + 2e-5 * 8) + 5e-4, rel=0.07)
    times.observe(4, 4, 5e-3, 1.0)
    assert times.at(8, 3) < 6e-3


def test_of_a_draft_in_one_pass_each_further_token_costs_a_row() -> None:
    """Only drafts of eight tokens were made; a shorter one takes nearly as long."""
    times = DraftTimes(one_pass=True)
    for rows in [1, 4, 16] * 30:
        computed = 0.004 + 1e-5 * rows * 9
        times.observe(rows, 8, computed, computed + 0.001)
    for rows, k in ((1, 8), (4, 2), (16, 4)):
        assert times.at(rows, k) == pytest.approx(0.005 + 1e-5 * rows * (k + 1), rel=0.15)
