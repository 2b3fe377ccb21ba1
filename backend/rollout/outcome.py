"""The results of a round, before they become tables and a report.  Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.records.kept import RowBatch
from backend.records.rows import VerificationRow

if TYPE_CHECKING:
    from backend.engine.front import RequestOutput


@dataclass(frozen=True)
class Death:
    """A worker lost during a round."""

    worker: int
    reason: str
    at_s: float
    """Seconds into the round."""
    resumed: int
    """Number of its requests that other workers took over."""


@dataclass(eq=False)
class Part:
    """One worker's share of a round.  A verifier that died and was started again counts as one worker."""

    number: int
    rows: RowBatch = field(default_factory=RowBatch)
    numbers: dict[str, int] = field(default_factory=dict)
    """Request number by id in the rows, for each request that ran here, wholly or in part."""
    completed: set[str] = field(default_factory=set)
    """Ids of the requests that ended here."""
    finished_s: float = 0.0
    """When the worker's last token arrived, in seconds into the round."""


@dataclass
class Round:
    """The results of one round."""

    number: int
    wall_s: float = 0.0
    """Seconds from the start of the round to the last token."""
    parts: list[Part] = field(default_factory=list)
    """In order of worker numbers."""
    responses: dict[int, RequestOutput] = field(default_factory=dict)
    """By request number."""
    deaths: list[Death] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    """When each request was first sent, in Unix seconds, by request number."""
    moves: int = 0
    """How many times a request was moved to a faster worker."""

    def tokens(self, number: int) -> Sequence[int]:
        """A response's tokens."""
        tokens: Sequence[int] = self.responses[number].outputs[0].token_ids
        return tokens

    def verifications(self) -> dict[int, list[VerificationRow]]:
        """The rows of verifications, over all workers, by request number."""
        found: dict[int, list[VerificationRow]] = {}
        for part in self.parts:
            for row in part.rows.verifications:
                if row.request_id in part.numbers:
                    found.setdefault(part.numbers[row.request_id], []).append(row)
        return found
