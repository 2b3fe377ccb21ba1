"""The features of live requests, kept in host memory so that a drafter that is new to a request starts warm.

Pure bookkeeping of bytes; worker's process, on the thread that runs the model.  A drafter computes its KV cache from these
rows, so whoever gets them all is in the state that the old drafter was in, whether that one is still there or not.  Of each
request the newest consecutive rows are kept.  When memory is short, the request that holds the most gives up the older half of
its rows: it loses distant context on its next drafter, and nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class _Kept:
    """Consecutive rows of one request, oldest first."""

    start: int
    """Position of the first row."""
    end: int
    """The position after the last row."""
    chunks: deque[bytes] = field(default_factory=deque)
    held: int = 0
    """Bytes."""


class FeatureStore:
    """At most `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[str, _Kept] = {}
        self.held = 0
        """Bytes."""

    def add(self, request_id: str, start: int, rows: bytes, row_bytes: int) -> None:
        """Rows of the positions from `start` on were computed; those known already (after a preemption) are not kept twice."""
        if not rows:
            return
        kept = self._kept.get(request_id)
        if kept is not None and start > kept.end:
            # What lies before a gap is of no use: a drafter takes rows in order, and the newest ones count the most.
            self.forget(request_id)
            kept = None
        if kept is None:
            kept = self._kept[request_id] = _Kept(start, start)
        new = rows[(kept.end - start) * row_bytes :]
        if not new:
            return
        kept.chunks.append(new)
        kept.end += len(new) // row_bytes
        kept.held += len(new)
        self.held += len(new)
        while self.held > self._capacity:
            self._give_up(row_bytes)

    def clear(self) -> None:
        """Forgets everything: the target has other weights."""
        self._kept.clear()
        self.held = 0

    def start(self, request_id: str, end: int) -> int:
        """Position of the first row kept for a request whose rows reach up to `end`; `end` itself when there are none."""
        kept = self._kept.get(request_id)
        return kept.start if kept is not None and kept.start <= end <= kept.end else end

    def rows(self, request_id: str, start: int, end: int, row_bytes: int) -> bytes:
        """The rows of the positions `start .. end - 1`, all of which must be kept."""
        kept = self._kept[request_id]
        if not kept.start <= start <= end <= kept.end:
            raise ValueError("rows that are not kept")
        if len(kept.chunks) > 1:
            kept.chunks = deque([b"".join(kept.chunks)])
        return kept.chunks[0][(start - kept.start) * row_bytes : (end - kept.start) * row_bytes]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self.held -= kept.held

    def _give_up(self, row_bytes: int) -> None:
        """The older half of the rows of the request that has the most."""
        request_id = max(self._kept, key=lambda each: self._kept[each].held)
        kept = self._kept[request_id]
        rows = max((kept.end - kept.start) // 2, 1)
        if rows >= kept.end - kept.start:
            self.forget(request_id)
            return
        newest = self.rows(request_id, kept.start + rows, kept.end, row_bytes)
        self.held -= kept.held - len(newest)
        kept.start, kept.chunks, kept.held = kept.start + rows, deque([newest]), len(newest)
