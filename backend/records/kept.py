"""Keeps rows in memory until a client takes them; a rollout gets its verifiers' rows so.  Engine process, engine thread.

The number of rows is bounded; further rows are lost and counted.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from backend.records.rows import DecisionRow, RequestRow, Row, StepRow, VerificationRow

KEPT_ROWS = 1_000_000
"""Most rows that a verifier keeps."""


class RowBatch(msgspec.Struct):
    """Rows in the order they were made, and how many were lost since the previous batch."""

    steps: list[StepRow] = msgspec.field(default_factory=list)
    verifications: list[VerificationRow] = msgspec.field(default_factory=list)
    requests: list[RequestRow] = msgspec.field(default_factory=list)
    lost: int = 0

    def add(self, other: RowBatch) -> None:
        """Appends a later batch."""
        self.steps += other.steps
        self.verifications += other.verifications
        self.requests += other.requests
        self.lost += other.lost

    def __len__(self) -> int:
        return len(self.steps) + len(self.verifications) + len(self.requests)


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
        """Keeps a row if there is room.  Decisions are not kept, because rollouts do not use them."""
        if self._beside is not None:
            self._beside(row)
        if isinstance(row, DecisionRow):
            return
        if len(self._kept) >= self._most:
            self._kept.lost += 1
        elif isinstance(row, VerificationRow):
            self._kept.verifications.append(row)
        elif isinstance(row, StepRow):
            self._kept.steps.append(row)
        else:
            self._kept.requests.append(row)
