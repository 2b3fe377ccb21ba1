"""Weights are learned from whatever drafts are compared with the text, from a prior that is only plausible."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.calibration import Calibration, Offsets
from backend.speculation.chances import chances, chances_of_many
from tests.support.properties import examples

SIGNS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16).map(lambda signs: signs[: len(signs) // 2 * 2])


def drafts(true: list[float], count: int, seed: int, k: int = 4) -> list[tuple[list[float], int, int]]:
    """Signs, matched and seen of drafts whose tokens are right with the chances of `true` weights."""
    dice, made = random.Random(seed), []
    for _ in range(count):
        signs = [s for _ in range(k) for s in (dice.gauss(-0.7, 0.7), dice.expovariate(0.6))]
        matched = 0
        for right in chances(true, signs):
            if dice.random() > right:
                break
            matched += 1
        made.append((signs, matched, min(matched + 1, k)))
    return made


def excess(calibration: Calibration, true: list[float], own: Offsets) -> float:
    """Root mean square distance of a request's chances from the true ones."""
    pairs = [
        (c, t)
        for signs, _, _ in drafts(true, 300, 99)
        for c, t in zip(calibration.chances(own, signs), chances(true, signs), strict=True)
    ]
    return math.sqrt(sum((c - t) ** 2 for c, t in pairs) / len(pairs))


@pytest.mark.parametrize(
    ("name", "true"),
    [
        ("a good head", [0.3, 0.6, 1.0, 0.8, 0.6, 0.5]),
        ("argmax drafts at temperature 1, one in five accepted", [0.0, 0.0, -1.4, -1.4, -1.4, -1.4]),
        ("a head that is always wrong", [0.0, 0.0, -4.0]),
        ("a head that is nearly always right", [0.0, 0.2, 4.0]),
        ("far tokens are worse", [0.2, 0.5, 1.5, 0.5, -0.5, -1.5]),
    ],
)
def test_two_hundred_drafts_are_enough(name: str, true: list[float]) -> None:
    soon, later = [], []
    for seed in range(3):
        calibration, own = Calibration(4), Offsets()
        for draft in drafts(true, 200, seed):
            calibration.observe(own, *draft)
        soon.append(excess(calibration, true, own))
        for draft in drafts(true, 2000, seed + 50):
            calibration.observe(own, *draft)
        later.append(excess(calibration, true, own))
    assert statistics.mean(soon) < 0.1
    assert statistics.mean(later) < 0.06


def test_new_requests_profit_from_those_before() -> None:
    calibration, true, requests = Calibration(4), [0.0, 0.0, -1.4], [Offsets() for _ in range(20)]
    for number, draft in enumerate(drafts(true, 400, 3)):
        calibration.observe(requests[number // 20], *draft)
    assert excess(calibration, true, Offsets()) < 0.08


def test_requests_that_differ_are_told_apart() -> None:
    calibration, easy, hard = Calibration(4), [0.3, 0.6, 2.0], [0.3, 0.6, -1.5]
    of_easy, of_hard = Offsets(), Offsets()
    for one, other in zip(drafts(easy, 100, 3), drafts(hard, 100, 4), strict=True):
        calibration.observe(of_easy, *one)
        calibration.observe(of_hard, *other)
    assert excess(calibration, easy, of_easy) < 0.12
    assert excess(calibration, hard, of_hard) < 0.12
    assert calibration.chances({}, [0.0, 0.0]) == chances(calibration.weights, [0.0, 0.0])


def test_it_follows_a_drafter_that_changes() -> None:
    calibration, before, after, own = Calibration(4), [0.3, 0.6, 1.5], [0.0, 0.1, -1.0], Offsets()
    for draft in drafts(before, 5000, 3):
        calibration.observe(own, *draft)
    for draft in drafts(after, 500, 4):
        calibration.observe(own, *draft)
    assert excess(calibration, after, own) < 0.12


def test_a_token_that_was_not_reached_teaches_nothing_of_its_own_place() -> None:
    calibration, own = Calibration(4), Offsets()
    for _ in range(50):
        calibration.observe(own, [0.0] * 8, 0, 1)
    first, last = calibration.weights[2], calibration.weights[-1]
    assert first < last < 0.5


@examples(30)
@given(st.lists(SIGNS, max_size=30), st.data())
def test_weights_stay_finite(all_signs: list[list[float]], data: st.DataObject) -> None:
    calibration, own = Calibration(3), Offsets()
    for signs in all_signs:
        seen = data.draw(st.integers(0, len(signs) // 2))
        calibration.observe(own, signs, data.draw(st.integers(max(seen - 1, 0), seen)), seen)
    assert all(math.isfinite(weight) and abs(weight) < 100 for weight in calibration.weights)


@examples(40)
@given(st.lists(st.lists(st.floats(width=32), min_size=1, max_size=6), min_size=1, max_size=12), st.data())
def test_the_chances_of_many_drafts_are_those_of_each(values: list[list[float]], data: st.DataObject) -> None:
    drafts = [[sign for value in each for sign in (value, -value)] for each in values]
    weights = data.draw(st.lists(st.floats(-40, 40), min_size=3, max_size=6))
    own = data.draw(st.lists(st.floats(-2, 2), min_size=len(drafts), max_size=len(drafts)))
    found = chances_of_many(weights, drafts, own)
    for each, signs, offset in zip(found, drafts, own, strict=True):
        assert each[: len(signs) // 2] == pytest.approx(chances(weights, signs, offset))
