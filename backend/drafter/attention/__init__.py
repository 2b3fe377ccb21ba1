"""Attention of single rows to rows of the KV cache: one call for all rows of all sequences, of any lengths.  Drafter thread.

What a row attends to is said by five numbers, so that branches which share their beginning need no mask.  With `at` the row's
own place, counted from its sequence's `start`, it attends to the rows

    0 .. bound - 1,    and    at, at - stride, at - 2 stride, ... down to tail.

A row that continues its sequence has bound 0, tail 0 and stride 1.  A branch has `bound` rows in common with others; behind
`tail`, one row of each of `stride` branches follow each other.  `bound` is at most `tail`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from backend.drafter.attention import cpu


@dataclass(frozen=True)
class Reach:
    """What rows see: int64 `[rows]` each.  `places` and `starts` are rows of the cache, the others count from `starts`."""

    places: Tensor
    starts: Tensor
    bounds: Tensor
    tails: Tensor
    strides: Tensor

    def of(self, rows: Tensor) -> Reach:
        """That of some rows, by their indices."""
        return Reach(*(each.index_select(0, rows) for each in self.columns()))

    def first(self, count: int) -> Reach:
        """That of the first `count` rows."""
        return Reach(*(each[:count] for each in self.columns()))

    def columns(self) -> list[Tensor]:
        """All five, as kernels read them: a number repeated for many rows is stored once, unless it is copied."""
        return [getattr(self, each.name).contiguous() for each in fields(self)]


def attend(queries: Tensor, cache: Tensor, reach: Reach) -> Tensor:
    """Attention of `queries` `[rows, heads, head_dim]` to keys and values `cache` `[capacity, 2, kv_heads, head_dim]`.

    Softmax is in float32; result as `queries`.  On a CPU all are float32.
    """
    scale = queries.shape[-1] ** -0.5
    if queries.is_cuda:
        from backend.drafter.attention import cuda

        return cuda.attend(queries, cache, reach, scale)
    result = torch.empty_like(queries)
    kernel: Callable[..., None] = cpu.attend
    kernel(*(each.contiguous().numpy() for each in (queries, cache, *reach.columns())), scale, result.numpy())
    return result
