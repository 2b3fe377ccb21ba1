"""The one line that says how long a step over so many requests takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.fleet import VerifierStats
from backend.fleet.speed import RESPONSE_TOKENS, Line, Speed, mean_speed
from tests.support.properties import examples


def run(batches: list[int], fixed_s: float, per_request_s: float, tokens: int = 3) -> Speed:
    line = Line()
    for batch in batches:
        for _ in range(10):
            line.note(batch, fixed_s + per_request_s * batch, tokens * batch)
    speed = line.read()
    assert speed is not None
    return speed


@examples(30)
@given(st.lists(st.integers(1, 64), min_size=20, max_size=60), st.floats(1e-3, 0.1), st.floats(0, 0.01))
def test_steps_of_the_batches_seen_are_near_those_measured(batches: list[int], fixed_s: float, per_request_s: float) -> None:
    speed = run(batches, fixed_s, per_request_s)
    assert speed.fixed_s >= 0
    assert speed.per_request_s >= 0
    assert speed.tokens == pytest.approx(3)
    true = fixed_s + per_request_s * batches[-1]
    assert 0.3 * true < speed.step_s(batches[-1]) < 3 * true


def test_two_batch_sizes_give_the_line_through_both() -> None:
    speed = run([4, 32] * 20, 0.020, 0.001)
    assert (speed.fixed_s, speed.per_request_s) == pytest.approx((0.020, 0.001), rel=0.05)


def test_while_all_steps_are_alike_half_of_one_grows_with_its_requests() -> None:
    speed = run([4], 0.08, 0.0)
    assert (speed.step_s(4), speed.per_request_s) == pytest.approx((0.08, 0.01))


def test_old_steps_are_forgotten() -> None:
    assert run([1] * 20 + [8] * 300, 0.01, 0.001).step_s(8) == pytest.approx(0.018)
    line = Line()
    for seconds in [0.5] * 100 + [0.01] * 3000:
        line.note(4, seconds)
    assert (line.read() or Speed(0, 0)).step_s(4) == pytest.approx(0.01, rel=0.01)


def test_nothing_is_known_before_the_first_step_nor_of_responses_before_one_ended_of_itself() -> None:
    line = Line()
    line.note(0, 1.0)
    line.note(1, 0.0)
    assert line.read() is None
    line.note(2, 0.5)
    assert line.read() is not None
    assert [mean_speed(each) for each in ([], [Speed(1, 2, 3), Speed(3, 4, 5)])] == [None, Speed(2, 3, 4)]
    stats = VerifierStats("v", 1.0, "sync", 4, tokens=80)
    assert stats.response_tokens == RESPONSE_TOKENS
    stats.requests_finished = {"stop": 1, "length": 1, "abort": 5}
    assert stats.response_tokens == 40
