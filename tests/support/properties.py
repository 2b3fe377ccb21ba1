"""The number of examples of a property test.  Tests only."""

from typing import Any

from hypothesis import settings

ORDINARY = 100
"""Hypothesis' own default number of examples."""


def examples(count: int, **others: Any) -> settings:
    """`count` examples in `make test`; with another profile (`tests/conftest.py`), more or fewer in the same proportion."""
    return settings(max_examples=count * settings().max_examples // ORDINARY, **others)
