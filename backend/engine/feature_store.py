"""Keeps the features of running requests in host memory, for drafters that are new to a request.

Pure bookkeeping of bytes; worker process, on the thread that runs the model.  A drafter computes its KV cache from these rows.
So a drafter that gets all of them reaches the state of the request's previous drafter, even if that one is gone.  The newest
consecutive rows of each request are kept.  When memory is short, the request with the most bytes gives up the older half of its
rows: its next drafter then lacks distant context, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Kept:
    """Consecutive rows of one request, oldest first."""

    start: int
    """Position of the first row."""
    end: int
    """The position after the last row."""
    rows: bytearray = field(default_factory=bytearray)


class FeatureStore:
    """Feature rows of at most `capacity` bytes in total."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[str, _Kept] = {}
        self.held = 0
        """Bytes."""

    def add(self, request_id: str, start: int, rows: bytes | memoryview, row_bytes: int) -> None:
        """Keeps the rows of the positions from `start` on.  Skips rows it has already (recomputed after a preemption)."""
        if not rows:
            return
        kept = self._kept.get(request_id)
        if kept is not None and start > kept.end:
            # Rows before a gap are useless: a drafter takes rows in order, and the newest matter most.
            self.forget(request_id)
            kept = None
        if kept is None:
            kept = self._kept[request_id] = _Kept(start, start)
        new = rows[(kept.end - start) * row_bytes :]
        if not new:
            return
        kept.rows += new
        kept.end += len(new) // row_bytes
        self.held += len(new)
        while self.held > self._capacity:
            self._give_up(row_bytes)

    def clear(self) -> None:
        """Forgets all rows, as required after an exchange of the target's weights."""
        self._kept.clear()
        self.held = 0

    def start(self, request_id: str, end: int) -> int:
        """Position of the first row kept for a request; `end` if no consecutive rows reach from there up to `end`."""
        kept = self._kept.get(request_id)
        return kept.start if kept is not None and kept.start <= end <= kept.end else end

    def rows(self, request_id: str, start: int, end: int, row_bytes: int) -> bytes:
        """The rows of the positions `start .. end - 1`.  Raises `ValueError` unless all of them are kept."""
        kept = self._kept[request_id]
        if not kept.start <= start <= end <= kept.end:
            raise ValueError("rows that are not kept")
        with memoryview(kept.rows) as whole:
            return bytes(whole[(start - kept.start) * row_bytes : (end - kept.start) * row_bytes])

    def forget(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self.held -= len(kept.rows)

    def _give_up(self, row_bytes: int) -> None:
        """Drops the older half of the rows of the request that holds the most bytes."""
        request_id = max(self._kept, key=lambda each: len(self._kept[each].rows))
        kept = self._kept[request_id]
        rows = max((kept.end - kept.start) // 2, 1)
        if rows >= kept.end - kept.start:
            self.forget(request_id)
            return
        del kept.rows[: rows * row_bytes]
        kept.start, self.held = kept.start + rows, self.held - rows * row_bytes
