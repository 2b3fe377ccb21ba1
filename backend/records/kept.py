"""Keeps rows in memory until a client takes them; a rollout gets its verifiers' rows so.  Engine process, engine thread.

The number of rows is bounded; further rows are lost and counted.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from backend.records.rows import Row, StepRow, VerificationRow

KEPT_ROWS = 1_000_000
"""Most rows that a verifier keeps."""


class RowBatch(msgspec.Struct):
    """Rows in the order they were made, and how many were lost since the previous batch."""

    steps: list[StepRow] = msgspec.field(default_factory=list)
    verifications: list[VerificationRow] = msgspec.field(default_factory=list)
    lost: int = 0

    def add(self, other: RowBatch) -> None:
        """Appends a later batch."""
        self.steps += other.steps
        self.verifications += other.verifications
        self.lost += other.lost

    def __len__(self) -> int:
        return len(self.steps) + len(self.verifications)


class KeptRows:
    """Keeps up to `most` rows, and passes every row to `beside`."""

    def __init__(self, most: int, beside: Callable[[Row], None] | None = None) -> None:
        self._most = most
        self._beside = beside
        self._kept = RowBatch()

    def take(self) -> RowBatch:
        taken, self._kept = self._kept, RowBatch()
        return taken

    def put(self, row: Row) -> None:
        """Keeps a step or verification if there is room.  A rollout makes rows of requests itself and needs no decisions."""
        if self._beside is not None:
            self._beside(row)
        if not isinstance(row, StepRow | VerificationRow):
            return
        if len(self._kept) >= self._most:
            self._kept.lost += 1
        elif isinstance(row, StepRow):
            self._kept.steps.append(row)
        else:
            self._kept.verifications.append(row)
