"""What came out of a round, before it becomes tables and a report.  Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.records.kept import RowBatch


@dataclass(frozen=True)
class Death:
    """A worker lost during a round."""

    worker: int
    reason: str
    at_s: float
    """Seconds into the round."""
    restarted: int
    """Requests that started again."""


@dataclass(eq=False)
class Part:
    """What one worker had of a round."""

    number: int
    rows: RowBatch
    numbers: dict[str, int] = field(default_factory=dict)
    """The requests it completed: their id in the rows, and their number."""
    finished_s: float = 0.0
    """When its last token came, in seconds into the round."""


@dataclass
class Round:
    """What came out of one round."""

    number: int
    wall_s: float = 0.0
    """From the first request's start to the last token."""
    parts: list[Part] = field(default_factory=list)
    """One number may occur twice: a verifier that died and came back."""
    responses: dict[int, list[int]] = field(default_factory=dict)
    """By request number: its tokens."""
    deaths: list[Death] = field(default_factory=list)
