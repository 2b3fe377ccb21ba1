"""What came out of a round, before it becomes tables and a report.  Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.records.kept import RowBatch
from backend.records.rows import VerificationRow


@dataclass(frozen=True)
class Death:
    """A worker lost during a round."""

    worker: int
    reason: str
    at_s: float
    """Seconds into the round."""
    resumed: int
    """Requests that went on elsewhere."""


@dataclass(eq=False)
class Part:
    """What one worker had of a round; a verifier that died and came back is one worker."""

    number: int
    rows: RowBatch = field(default_factory=RowBatch)
    numbers: dict[str, int] = field(default_factory=dict)
    """The requests it had, in whole or in part: their id in the rows, and their number."""
    completed: set[str] = field(default_factory=set)
    """Those of these ids that ended here."""
    finished_s: float = 0.0
    """When its last token came, in seconds into the round."""


@dataclass
class Round:
    """What came out of one round."""

    number: int
    wall_s: float = 0.0
    """From the first request's start to the last token."""
    parts: list[Part] = field(default_factory=list)
    """By number."""
    responses: dict[int, list[int]] = field(default_factory=dict)
    """By request number: its tokens."""
    deaths: list[Death] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    """By request number: when it was first sent, in Unix seconds."""
    moves: int = 0
    """Requests taken from one worker to another that had less to do."""

    def verifications(self) -> dict[int, list[VerificationRow]]:
        """By request number, wherever they were."""
        found: dict[int, list[VerificationRow]] = {}
        for part in self.parts:
            for row in part.rows.verifications:
                if row.request_id in part.numbers:
                    found.setdefault(part.numbers[row.request_id], []).append(row)
        return found
