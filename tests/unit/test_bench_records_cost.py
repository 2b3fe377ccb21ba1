"""What records cost: pairs, their order, and what an interval says of a limit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backend.lab.bench.records_cost import Timed, cost_of, interval, order
from backend.lab.bench.stopwatch import TimedRecording

PAIRS = 80


def loads(cost: float, noise: float, drift: float = 0.0) -> list[Timed]:
    """A machine that loses `drift` of its speed over all loads; the same tokens each time."""
    chance = random.Random(1)
    made = []
    for number, on in enumerate(order(PAIRS)):
        slower = (1 + drift * number / (2 * PAIRS)) * chance.gauss(1, noise) / (1 - cost if on else 1)
        made.append(Timed(512, 0.5 * slower, 0.45 / (1 - cost if on else 1), on, settling_s=0.0))
    return made


def test_pairs_alternate() -> None:
    assert order(4) == [False, True, True, False, False, True, True, False]
    assert sum(order(7)) == 7


def test_the_cost_is_found_through_noise_and_drift() -> None:
    found = cost_of("off", loads(0.05, 0.02, drift=0.2), 0.004, 0.003)
    assert found.pairs == PAIRS
    assert found.throughput.low < 0.05 < found.throughput.high
    assert found.throughput.high - found.throughput.low < 0.02
    assert found.cpu.median == pytest.approx(0.05)
    assert found.tokens_per_s_without == pytest.approx(512 / 0.55, rel=0.05)


def test_what_the_writer_does_afterwards_counts() -> None:
    timed = [Timed(100, 1.0, 0.9, on, settling_s=0.1 if on else 0.0) for on in order(10)]
    found = cost_of("off", timed, 0.0, 0.0)
    assert found.throughput.median == pytest.approx(1 - 1 / 1.1)
    assert found.cpu.median == pytest.approx(1 - 0.9 / 1.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loads(0.0, 0.001), "below 1%"),
        (lambda: loads(0.03, 0.001), "above 1%"),
        (lambda: loads(0.01, 0.05), "undecided about 1%"),
    ],
)
def test_an_interval_decides_or_does_not(make: Callable[[], list[Timed]], said: str) -> None:
    assert cost_of("auto", make(), 0.0, 0.0).verdict(0.01).startswith(said)


def test_the_interval_holds_the_median_and_is_the_same_twice() -> None:
    values = [random.Random(2).gauss(0, 1) for _ in range(50)]
    found = interval(values)
    assert found.low <= found.median <= found.high
    assert interval(values) == found
    assert str(interval([0.01, 0.01])) == "+1.00% (+1.00% to +1.00%)"


def test_what_is_counted_and_what_is_seen_both_have_to_be_below() -> None:
    quiet, above = loads(0.0, 0.001), loads(0.03, 0.001)
    assert cost_of("off", quiet, 0.004, 0.005).is_below(0.01)
    assert not cost_of("off", quiet, 0.006, 0.005).is_below(0.01)
    assert not cost_of("off", above, 0.001, 0.001).is_below(0.01)


def test_a_stopwatch_passes_everything_on() -> None:
    class Noting:
        def __init__(self) -> None:
            self.calls: list[object] = []

        def emitted(self, request_id: str, tokens: int) -> None:
            self.calls.append((request_id, tokens, sum(range(10_000))))

        def began(self, request_id: str, *, teacher_forced: bool = False) -> None:
            self.calls.append((request_id, teacher_forced))

    noting = Noting()
    timed = TimedRecording(noting)
    timed.emitted("a", 3)
    first = timed.spent_s
    timed.began("a", teacher_forced=True)
    timed.emitted("a", 3)
    assert [call[:2] for call in noting.calls] == [("a", 3), ("a", True), ("a", 3)]  # type: ignore[index]
    assert 0 < first < timed.spent_s
