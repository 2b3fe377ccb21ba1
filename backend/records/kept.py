"""Rows kept in memory until a client takes them: how a rollout gets the rows of its verifiers.  Engine process, engine thread.

Bounded: what does not fit is counted and lost.
"""

from __future__ import annotations

import msgspec

from backend.records.recorder import NullRecorder, Recorder
from backend.records.rows import DecisionRow, RequestRow, StepRow, VerificationRow


class RowBatch(msgspec.Struct):
    """Rows in the order they happened, and how many were lost since the batch before."""

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
    """A `Recorder` that keeps `most` rows, and hands every row on to `beside`."""

    def __init__(self, most: int, beside: Recorder | None = None) -> None:
        self._most = most
        self._beside = beside or NullRecorder()
        self._kept = RowBatch()

    def take(self) -> RowBatch:
        """What was kept since the last call."""
        taken, self._kept = self._kept, RowBatch()
        return taken

    def step(self, row: StepRow) -> None:
        """Kept where there is room."""
        self._beside.step(row)
        if self._has_room():
            self._kept.steps.append(row)

    def verification(self, row: VerificationRow) -> None:
        """Kept where there is room."""
        self._beside.verification(row)
        if self._has_room():
            self._kept.verifications.append(row)

    def request(self, row: RequestRow) -> None:
        """Kept where there is room."""
        self._beside.request(row)
        if self._has_room():
            self._kept.requests.append(row)

    def decision(self, row: DecisionRow) -> None:
        """Not kept: a rollout asks what was done, not why."""
        self._beside.decision(row)

    def _has_room(self) -> bool:
        if len(self._kept) < self._most:
            return True
        self._kept.lost += 1
        return False
