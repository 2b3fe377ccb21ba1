"""What a speculator still holds.  Tests only."""

from __future__ import annotations

from backend.speculation.speculator import Speculator


def assert_nothing_is_left(speculator: Speculator) -> None:
    """No table has an entry for any request, known or not: all have been forgotten."""
    tables = {
        "requests": speculator._requests,
        "ended": speculator._ended,
        "not learned from": speculator._unlearned,
        "pending": speculator.questions.pending,
        "overdue": speculator.questions._overdue,
        "guesses": speculator._guesses._open,
    }
    if speculator._lookups is not None:
        tables["look-ups"] = speculator._lookups._own
    for source, calibration in speculator._calibrations.items():
        tables[f"offsets of {source}"] = calibration._requests
    held = {name: set(table) for name, table in tables.items() if table}
    assert not held, held
