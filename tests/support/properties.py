"""How many examples a property test draws.  Tests only."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

ORDINARY = 100
"""What hypothesis draws where nothing is said."""


def examples(count: int, **others: Any) -> settings:
    """`count` examples in `make test`, and as many times more as the profile in use draws more (`tests/conftest.py`)."""
    return settings(max_examples=count * settings().max_examples // ORDINARY, **others)
