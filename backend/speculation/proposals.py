"""What a sampled draft was drawn from.  Pure; scheduler's process and workers.

A draft's cut, and all other decisions about whether its token i is verified, may depend on q_1..q_i and on x_1..x_(i-1), never
on x_i or what follows.  Otherwise the text would be biased (docs/reference/drafting.md, "Who may know what").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backend.speculation.kernels import find_sound


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
        find_sound(both, chances, drawn, np.uint32(vocab_size), is_sound)
        for i, (place, fits) in enumerate(zip(places, is_sound.tolist(), strict=True)):
            if fits:
                found[place] = Proposal(ids[i, 0], chances[i, 1])
    return found
