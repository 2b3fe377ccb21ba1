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
        self._free: dict[int, set[int]] = {}
        """First units of the free stretches, by their size in units.  Each is a multiple of that size."""
        self._size_of: dict[int, int] = {}
        self.largest = UNIT << (units.bit_length() - 1)
        start = 0
        while start < units:
            size = 1 << ((units - start).bit_length() - 1)
            self._free[size] = {start}
            start += size

    def take(self, rows: int) -> tuple[int, int] | None:
        """A stretch of at least `rows` rows, one or more, as (first row, rows); None when none is free."""
        wanted = 1 << ((rows - 1) // UNIT).bit_length()
        size = min((s for s, free in self._free.items() if s >= wanted and free), default=None)
        if size is None:
            return None
        start = self._free[size].pop()
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        self._size_of[start] = size
        return start * UNIT, size * UNIT

    def give_back(self, first_row: int) -> None:
        """Frees a stretch, and joins it with its free neighbours."""
        start = first_row // UNIT
        size = self._size_of.pop(start)
        # The buddy of a stretch that was never split would reach beyond the capacity, so it is never free.
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        self._free.setdefault(size, set()).add(start)
