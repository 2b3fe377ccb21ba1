"""What a sampled draft was drawn from.  Pure; scheduler's process and workers.

A draft's cut, and all other decisions about whether its token i is verified, may depend on q_1..q_i and on x_1..x_(i-1), never
on x_i or what follows.  Otherwise the text would be biased (docs/drafting.md, "Who may know what").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROUNDING = 1e-3
"""By how much a row's sum may differ from 1."""


class Proposal(NamedTuple):
    """The distributions q_1..q_n that a draft's tokens were sampled from.  Token ids within a row are distinct."""

    ids: npt.NDArray[np.int32]
    """`[n, M]`."""
    chances: npt.NDArray[np.float32]
    """`[n, M]`; the sum of each row is 1."""

    def part(self, first: int, last: int) -> Proposal:
        """That of the draft's tokens `first` to `last - 1`."""
        return Proposal(self.ids[first:last], self.chances[first:last])


def unpack(data: bytes, tokens: Sequence[int], vocab_size: int) -> Proposal | None:
    """Reads `Draft.proposal`; None if it is malformed, or could not have given the draft."""
    count = len(tokens)
    width, rest = divmod(len(data), 8 * count)
    if rest or not width:
        return None
    half = len(data) // 2
    ids = np.frombuffer(data, "<i4", count * width).reshape(count, width)
    chances = np.frombuffer(data, "<f4", count * width, half).reshape(count, width)
    drawn = np.where(ids == np.asarray(tokens)[:, None], chances, 0.0).max(axis=1)
    is_sound = (
        bool((chances >= 0).all())
        and bool((np.abs(chances.sum(axis=1) - 1) < ROUNDING).all())
        and bool((drawn > 0).all())
        and int(ids.min()) >= 0
        and int(ids.max()) < vocab_size
    )
    return Proposal(ids, chances) if is_sound else None
