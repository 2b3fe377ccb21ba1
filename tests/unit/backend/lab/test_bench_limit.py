"""What measured acceptance and step times would allow."""

from __future__ import annotations

import pytest

from backend.lab.bench.measure import limit, step_times


def test_the_limit_is_that_of_the_best_k() -> None:
    # Four requests; a plain step takes 1.4 s, one more token each 0.4 s more.
    def step_s(tokens: float) -> float:
        return 1 + tokens / 10

    shares = [0.8, 0.6, 0.1]
    by_k = [1.0, 1.8 * 1.4 / 1.8, 2.4 * 1.4 / 2.2, 2.5 * 1.4 / 2.6]
    assert limit(4, shares, step_s) == pytest.approx(max(by_k)) == pytest.approx(by_k[2])


def test_no_draft_pays_where_time_grows_with_tokens() -> None:
    assert limit(4, [0.9, 0.8], lambda tokens: tokens) == 1.0
    assert limit(4, [], lambda tokens: tokens) == 1.0


def test_step_times_are_the_line_through_what_was_measured() -> None:
    found = step_times([(1, 0.011), (4, 0.014), (36, 0.046)])
    assert found is not None
    assert found(10) == pytest.approx(0.02)
    assert step_times([(4, 0.014), (4.1, 0.015)]) is None, "one size says nothing of another"


@pytest.mark.parametrize("steps", [[(1, 0.02), (9, 0.01)], [(1, 0.001), (10, 0.1)]])
def test_neither_part_of_a_step_is_negative(steps: list[tuple[float, float]]) -> None:
    found = step_times(steps)
    assert found is not None
    assert found(1) >= 0
    assert found(9) >= found(1)
