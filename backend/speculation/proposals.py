"""What a sampled draft was drawn from.  Pure; scheduler's process and workers.

A draft's cut, and all other decisions about whether its token i is verified, may depend on q_1..q_i and on x_1..x_(i-1), never
on x_i or what follows.  Otherwise the text would be biased (docs/reference/drafting.md, "Who may know what").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backend.noise.cpu import compiled

ROUNDING = 1e-3
"""By how much the sum of a distribution may differ from 1."""
_MOST = np.uint32(0x3F80FFFF)
"""Bits of a float32 slightly above 1.  Those of a larger number, of a negative one and of NaN are more, unsigned."""


class Proposal(NamedTuple):
    """The distributions q_1..q_n that a draft's tokens were sampled from.  Token ids within a row are distinct."""

    ids: npt.NDArray[np.int32]
    """`[n, M]`."""
    chances: npt.NDArray[np.float32]
    """`[n, M]`; the sum of each row is 1."""

    def part(self, first: int, last: int) -> Proposal:
        """That of the draft's tokens `first` to `last - 1`."""
        return Proposal(self.ids[first:last], self.chances[first:last])


def unpack(packed: Sequence[bytes], drafts: Sequence[Sequence[int]], vocab_size: int) -> list[Proposal | None]:
    """Reads each draft's `Draft.proposal`; None if it is empty, malformed, or could not have given the draft.

    `drafts` hold token ids of the vocabulary.

    Those of one size are read together: NumPy takes about as long for one as for a batch.
    """
    found: list[Proposal | None] = [None] * len(drafts)
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (data, tokens) in enumerate(zip(packed, drafts, strict=True)):
        alike.setdefault((len(data), len(tokens)), []).append(i)
    for (size, count), places in alike.items():
        width, rest = divmod(size, 8 * count) if count else (0, 0)
        if rest or not width:
            continue
        both = np.frombuffer(b"".join([packed[i] for i in places]), "<u4").reshape(len(places), 2, count, width)
        drawn = np.array([drafts[i] for i in places], np.uint32)
        ids, chances, is_sound = both.view("<i4"), both.view("<f4"), np.empty(len(places), np.bool_)
        _find_sound(both, chances, drawn, np.uint32(vocab_size), is_sound)
        for i, (place, fits) in enumerate(zip(places, is_sound.tolist(), strict=True)):
            if fits:
                found[place] = Proposal(ids[i, 0], chances[i, 1])
    return found


@compiled
def _find_sound(packed: Any, chances: Any, drawn: Any, vocab_size: Any, found: Any) -> None:
    """Writes which of the drafts `drawn` `[drafts, tokens]` their distributions could have given.

    The first call compiles, for seconds.  `packed` `[drafts, 2, tokens, M]`: token ids, and the bits of their probabilities;
    `chances` is its float32 view.
    """
    drafts, _, tokens, width = packed.shape
    for i in range(drafts):
        is_sound = True
        for j in range(tokens):
            total, was_drawn = 0.0, False
            for m in range(width):
                token, bits = packed[i, 0, j, m], packed[i, 1, j, m]
                is_sound &= token < vocab_size
                was_drawn |= (token == drawn[i, j]) & (bits > 0)
                total += chances[i, 1, j, m] if bits <= _MOST else 2.0  # No sum with NaN: these loops are compiled without it.
            is_sound &= was_drawn & (abs(total - 1) < ROUNDING)
        found[i] = is_sound
