"""Checks that a speculator has forgotten all requests, and computes which draft tokens it would spend.  Tests only."""

from collections.abc import Callable, Sequence
from typing import Any

from backend.speculation.budget import Spent, spend
from backend.speculation.speculator import Speculator


def spent_on(rows: Sequence[Sequence[float]], step_s: Callable[[int], float], base: int) -> Spent:
    """`spend` with step times from the function `step_s`; steps have `base` tokens besides the draft tokens."""
    return spend(rows, [step_s(base + n) for n in range(sum(map(len, rows)) + 2)])


def assert_nothing_is_left(speculator: Speculator) -> None:
    tables: dict[str, Any] = {
        "requests": speculator.candidates.requests,
        "predicted": speculator.candidates.predicted,
        "ended": speculator._ended,
        "not learned from": speculator._unlearned,
        "pending": speculator.questions.pending,
        "paired": speculator.preference._together,
    }
    assert speculator.candidates.forced == 0
    held = {name: set(table) for name, table in tables.items() if table}
    assert not held, held
