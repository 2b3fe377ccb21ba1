"""Keeps track of which sequence owns which rows of the drafter's KV cache.  Pure; drafter thread; `head.py` owns the tensors.

Each row has a position: a head's row p is computed from the target's feature at position p and the token at p + 1, a draft
model's from the token at p.  Rows are kept in ascending position; a position whose feature was lost is left out.  Only rows
made from true features are counted here.  Rows that drafting makes lie behind a sequence's last row, and the next true rows
overwrite them.

Features depend on the target's prefix alone, so a head's rows 0..m-1 serve any sequence with the same tokens 0..m, of any
verifier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from backend.drafter.proposer import GREEDY, Sampling
from backend.speculation.tokens import common_prefix, splice

if TYPE_CHECKING:
    from torch import Tensor

    from backend.wire.drafting import Outcome

SHORTEST = 16
"""Tokens of the shortest prefix that is worth sharing."""
UNIT = 64
"""Rows of the smallest stretch."""


class Extents:
    """Hands out stretches of `0 .. capacity - 1`, `capacity` rounded down to whole units, by the buddy system.

    Knuth, The Art of Computer Programming 1, 2.5.
    Every sequence keeps its rows in one stretch, so that attention reads them in place.  A stretch holds a power of two times
    `UNIT` rows.  A sequence that outgrows its stretch moves to one twice as long: over its life a constant per row.
    """

    def __init__(self, capacity: int) -> None:
        units = max(capacity // UNIT, 1)
        self.capacity = units * UNIT
        self._free: dict[int, set[int]] = {}
        """First units of the free stretches, by their size in units.  Each is a multiple of that size."""
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
        return start * UNIT, size * UNIT

    def give_back(self, first_row: int, rows: int) -> None:
        """Frees a stretch, and joins it with its free neighbours."""
        start, size = first_row // UNIT, rows // UNIT
        # The buddy of a stretch that was never split would reach beyond the capacity, so it is never free.
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        self._free.setdefault(size, set()).add(start)


@dataclass(eq=False)
class Sequence:
    """One request's tokens and rows: `length` rows in `spans`, runs of consecutive positions, `[first position, rows]`."""

    key: Hashable
    tokens: list[int]
    spans: list[list[int]] = field(default_factory=list)
    length: int = 0
    start: int = 0
    """First row of its stretch in the cache."""
    room: int = 0
    """Rows of its stretch; 0: it has no stretch."""
    is_current: bool = True
    """Whether its rows come from the target's present weights."""
    tip: tuple[int, Tensor] | None = None
    """Where drafting starts: the base length of its last round, and the head's output `[1, hidden]` for the last row."""
    ahead: tuple[int, list[int]] = (0, [])
    """A position, and tokens whose rows from there on lie behind the last true row.  They become true if these tokens come."""
    drafted: tuple[int, list[int], Tensor] | None = None
    """Its latest draft, while the draft's rows lie behind its own: where its own begin, the tokens, and the head's outputs
    `[tokens - 1, hidden]` after them."""
    imagined: tuple[int, list[Outcome], Tensor] | None = None
    """The outcomes that were last drafted for: its length then, they, and the head's outputs `[outcomes, tokens - 1, hidden]`
    after their draft tokens."""
    sampling: Sampling = GREEDY

    @property
    def unbroken(self) -> int:
        """Rows at positions 0, 1, 2, ... without a gap."""
        return self.spans[0][1] if self.spans and self.spans[0][0] == 0 else 0

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.spans[-1][0] + self.spans[-1][1] if self.spans else 0


class RowCache:
    """The sequences of all verifiers.  `move(source, target, rows)` copies cache rows; the stretches do not overlap.

    Row p is computed from the token at p + `token_offset`.
    """

    def __init__(self, capacity: int, move: Callable[[int, int, int], None], token_offset: int = 1) -> None:
        self._extents = Extents(capacity)
        self._move, self._offset = move, token_offset
        self._open: OrderedDict[Hashable, Sequence] = OrderedDict()
        self._closed: OrderedDict[Sequence, None] = OrderedDict()
        self.evictions = 0

    @property
    def capacity(self) -> int:
        """Rows of the whole cache."""
        return self._extents.capacity

    @property
    def longest(self) -> int:
        """Most rows of one sequence."""
        return self._extents.largest

    @property
    def usage(self) -> float:
        """Share of the cache that open sequences hold; the rest is free, or held by closed ones and can be taken."""
        return sum(sequence.room for sequence in self._open.values()) / self._extents.capacity

    def __len__(self) -> int:
        return len(self._open)

    def get(self, key: Hashable) -> Sequence | None:
        """An open sequence, marked as used."""
        sequence = self._open.get(key)
        if sequence is not None:
            self._open.move_to_end(key)
        return sequence

    def peek(self, key: Hashable) -> Sequence | None:
        """An open sequence, without marking it as used."""
        return self._open.get(key)

    def open(self, key: Hashable, tokens: list[int], limit: int) -> Sequence:
        """Starts a sequence, with at most `limit` leading rows taken over or copied from one with the same prefix."""
        self.close(key)
        sequence = Sequence(key, tokens)
        self._open[key] = sequence
        source, rows = self._find(tokens)
        if source is not None and limit > 0:
            self._reuse(source, sequence, min(rows, limit))
        return sequence

    def extend_tokens(self, sequence: Sequence, base_len: int, tokens: list[int]) -> None:
        """Makes the text `base_len` long and end with `tokens`.  Drops later or different tokens, and their rows."""
        kept = splice(sequence.tokens, base_len, tokens)
        self.truncate(sequence, kept - self._offset)
        sequence.drafted = None

    def truncate(self, sequence: Sequence, position: int) -> None:
        """Drops all rows at `position` and behind."""
        while sequence.spans and sequence.end > position:
            first, rows = sequence.spans[-1]
            kept = max(position - first, 0)
            sequence.length -= rows - kept
            if kept:
                sequence.spans[-1][1] = kept
            else:
                sequence.spans.pop()

    def reserve(self, sequence: Sequence, rows: int, pinned: Collection[Sequence] = (), takes_from_open: bool = True) -> bool:
        """Makes room for `rows` rows behind the sequence's last.  Other sequences may lose theirs, except `pinned` ones.

        If that is not enough, the sequence loses its own earlier rows.  False when there is no room at all.
        Unless it `takes_from_open`, only closed sequences lose theirs; False when that is not enough.
        """
        while (wanted := sequence.length + rows) > sequence.room:
            victims = chain(self._closed, self._open.values() if takes_from_open else ())
            if (taken := self._extents.take(wanted)) is not None:
                self._relocate(sequence, *taken)
            elif wanted > self._extents.largest or not self._evict(victims, {sequence, *pinned}):
                if not takes_from_open or not sequence.room:
                    return False
                self._forget(sequence)
        return True

    def append(self, sequence: Sequence, position: int, rows: int) -> None:
        """Counts `rows` rows from `position` on as committed.

        Raises `ValueError` if room was not reserved, or if `position` lies before the sequence's end.
        """
        if position < sequence.end or sequence.length + rows > sequence.room:
            raise ValueError("rows appended without truncation or room")
        if sequence.spans and sequence.end == position:
            sequence.spans[-1][1] += rows
        elif rows:
            sequence.spans.append([position, rows])
        sequence.length += rows
        sequence.drafted = None

    def adopt(self, sequence: Sequence) -> None:
        """Commits the rows made ahead for tokens that have come, without the last token's: drafting starts by computing it."""
        position, tokens = sequence.ahead
        sequence.ahead = (0, [])
        rows = common_prefix(sequence.tokens[position + self._offset : -1], tokens)
        if rows and position == sequence.end:
            self.append(sequence, position, rows)

    def invalidate(self) -> None:
        """The target's weights were exchanged: no new sequence may reuse present rows.

        Open sequences keep their rows: they belong to other verifiers, and end soon enough.
        """
        for sequence in list(self._closed):
            self._forget(sequence)
        for sequence in self._open.values():
            sequence.is_current = False

    def close(self, key: Hashable) -> None:
        """The request is over.  Its rows stay for reuse until their room is needed."""
        sequence = self._open.pop(key, None)
        if sequence is None:
            return
        sequence.tip = sequence.drafted = sequence.imagined = None
        if sequence.is_current and sequence.unbroken + self._offset >= SHORTEST:
            self._closed[sequence] = None
        else:
            self._forget(sequence)

    def _find(self, tokens: list[int]) -> tuple[Sequence | None, int]:
        """The sequence that shares the most leading rows with one of these tokens, and how many."""
        if len(tokens) < SHORTEST:
            return None, 0
        found, rows = None, SHORTEST - self._offset - 1
        last, token = SHORTEST - 1, tokens[SHORTEST - 1]
        for each in (*self._closed, *self._open.values()):
            # One more row takes this token.  Most sequences have another one there, and are compared no further.
            if each.length > rows and each.tokens[last] == token and each.is_current:
                shared = min(common_prefix(each.tokens, tokens) - self._offset, each.unbroken)
                if shared > rows:
                    found, rows, last = each, shared, shared + self._offset
                    if last == len(tokens):
                        break
                    token = tokens[last]
        return found, rows

    def _reuse(self, source: Sequence, sequence: Sequence, rows: int) -> None:
        is_closed = source in self._closed
        if is_closed and rows == source.length:
            sequence.start, sequence.room = source.start, source.room
            source.room = 0
            self._forget(source)
        else:
            if is_closed:
                self._closed.move_to_end(source)
            else:
                self._open.move_to_end(source.key)
            if not self.reserve(sequence, rows, (source,)):
                return
            self._move(source.start, sequence.start, rows)
        self.append(sequence, 0, rows)

    def _relocate(self, sequence: Sequence, start: int, room: int) -> None:
        if sequence.length:
            self._move(sequence.start, start, sequence.length)
        self._release(sequence)
        sequence.start, sequence.room = start, room

    def _evict(self, victims: Iterable[Sequence], kept: Collection[Sequence]) -> bool:
        """Frees the rows of the first of these sequences that has any and is not to be kept; False when there is none."""
        victim = next((each for each in victims if each.room and each not in kept), None)
        if victim is None:
            return False
        self.evictions += 1
        # The verifier of an open sequence need not know.
        self._forget(victim)
        return True

    def _forget(self, sequence: Sequence) -> None:
        """Frees a sequence's rows; an open one goes on without them."""
        self._closed.pop(sequence, None)
        sequence.spans.clear()
        sequence.length = 0
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.room:
            self._extents.give_back(sequence.start, sequence.room)
        sequence.room = 0
        sequence.ahead = (0, [])
