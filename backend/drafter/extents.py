"""Allocates contiguous stretches of cache rows, by the buddy system (Knuth, TAOCP 1, 2.5).  Pure; drafter thread.

Every sequence keeps its rows in one stretch, so that attention reads them in place.  A stretch holds a power of two times
`UNIT` rows.  A sequence that outgrows its stretch moves to one twice as long; over its life that costs a constant per row.
"""

from __future__ import annotations

UNIT = 64


class Extents:
    """Hands out stretches of `0 .. capacity - 1`, `capacity` rounded down to whole units."""

    def __init__(self, capacity: int) -> None:
        units = max(capacity // UNIT, 1)
        self.capacity = units * UNIT
        self.used = 0
        self._free: dict[int, set[int]] = {}
        self._size_of: dict[int, int] = {}
        self._top_level: set[tuple[int, int]] = set()
        start = 0
        while start < units:
            size = 1 << ((units - start).bit_length() - 1)
            self._free.setdefault(size, set()).add(start)
            self._top_level.add((start, size))
            start += size
        self.largest = max(size for _, size in self._top_level) * UNIT

    def size_for(self, rows: int) -> int:
        """Size of the stretch for `rows` rows."""
        return UNIT << max((max(rows, 1) - 1) // UNIT, 0).bit_length()

    def take(self, rows: int) -> tuple[int, int] | None:
        """A stretch of at least `rows` rows as (first row, rows); None when none is free."""
        wanted = self.size_for(rows) // UNIT
        size = min((s for s, free in self._free.items() if s >= wanted and free), default=None)
        if size is None:
            return None
        start = self._free[size].pop()
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        self._size_of[start] = size
        self.used += size * UNIT
        return start * UNIT, size * UNIT

    def give_back(self, first_row: int) -> None:
        """Frees a stretch, and joins it with its free neighbours."""
        start = first_row // UNIT
        size = self._size_of.pop(start)
        self.used -= size * UNIT
        while not self._is_whole(start, size):
            base = self._base(start, size)
            buddy = base + ((start - base) ^ size)
            free = self._free.get(size, set())
            if buddy not in free:
                break
            free.remove(buddy)
            start, size = min(start, buddy), size * 2
        self._free.setdefault(size, set()).add(start)

    def _is_whole(self, start: int, size: int) -> bool:
        return (start, size) in self._top_level

    def _base(self, start: int, size: int) -> int:
        """The first unit of the top-level block this stretch was split from."""
        return next(first for first, whole in self._top_level if first <= start and start + size <= first + whole)
