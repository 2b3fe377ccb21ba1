"""Whose time it is: exclusive times by label, and the figures made of them."""

from __future__ import annotations

import time

import pytest

from backend.lab.bench.profile import medians_us, per_request_us, rows_of
from backend.lab.bench.stopwatch import COMPUTE, THEIRS, Stopwatch


class Layers:
    """Three methods that call each other; each spends its own time."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def outer(self) -> str:
        self.clock[0] += 1
        self.inner()
        self.clock[0] += 2
        self.inner()
        return "done"

    def inner(self) -> None:
        self.clock[0] += 10
        if self.clock[0] > 1000:
            raise RuntimeError


def test_time_counts_for_the_innermost_label(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    wrapped = type("Wrapped", (Layers,), {"outer": Layers.outer, "inner": Layers.inner})
    watch = Stopwatch()
    watch.wrap(wrapped, "outer", "ours")
    watch.wrap(wrapped, "inner", THEIRS)
    layers = wrapped(clock)
    assert layers.outer() == "done"
    clock[0] += 500
    watch.mark(3)
    assert watch.take() == [(3, {"ours": 3.0, THEIRS: 20.0})]
    assert watch.take() == []
    clock[0] = 2000
    with pytest.raises(RuntimeError):
        layers.outer()
    watch.mark(1)
    assert watch.take() == [(1, {"ours": 1.0, THEIRS: 10.0})], "an exception ends what was under way"


def test_figures_are_medians_of_laps_with_so_many_requests() -> None:
    laps = [(16, {"a": 1e-6 * i, "b": 5e-6, THEIRS: 1.0, COMPUTE: 1.0}) for i in (1, 2, 90)] + [(3, {"a": 1.0})]
    found = medians_us(laps, 16)
    assert found["a"] == pytest.approx(2)
    assert found["ours"] == pytest.approx(7)
    assert found["laps"] == 3
    assert medians_us(laps, 4) == {}


def test_fixed_and_per_request_cost() -> None:
    fixed, each = per_request_us({"ours": 130.0}, {"ours": 580.0}, 16)
    assert (fixed, each) == (100.0, 30.0)
    rows = rows_of("sync", {"verifier": {1: [(1, {"a": 130e-6})], 16: [(16, {"a": 580e-6})], 4: []}})
    assert [(row["requests"], round(row.get("per_request_us", 0.0))) for row in rows] == [(1, 0), (16, 30)]
