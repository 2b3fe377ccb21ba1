"""Attention on a GPU: Triton kernels, which read keys and values in place.  Imported with the first CUDA tensor.

Flash-decoding (Dao et al., 2023): a row's keys are divided among several programs, whose results a second kernel joins.
"""

# Triton accepts no annotations except `constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.drafter.attention import Reach

BLOCK = 64
PROGRAMS = 512
"""Programs that a call should have at least: a few for each of a large GPU's multiprocessors."""
MOST_SPLITS = 32

_kernel = triton.jit(do_not_specialize_on_alignment=["places", "starts", "bounds", "tails", "strides"])


@_kernel
def attend_kernel(
    queries, cache, places, starts, bounds, tails, strides, sums, tops, totals, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    at = (tl.load(places + row) - start).to(tl.int32)
    # A remainder of 64 bits for each row attended to would cost more than reading it.
    bound, tail, stride = (
        tl.load(bounds + row).to(tl.int32),
        tl.load(tails + row).to(tl.int32),
        tl.load(strides + row).to(tl.int32),
    )
    members, dims = tl.arange(0, PADDED), tl.arange(0, WIDE)
    inside = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    own = row.to(tl.int64) * KV * GROUP + head * GROUP + members
    query = tl.load(queries + own[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    chunk = tl.cdiv(tl.cdiv(at + 1, SPLITS), BLOCK) * BLOCK
    begin = split * chunk
    end = tl.minimum(begin + chunk, at + 1)
    top = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    found = tl.zeros((PADDED, WIDE), tl.float32)
    for first in range(begin, end, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        seen = ((offsets < bound) | ((offsets >= tail) & ((at - offsets) % stride == 0))) & (offsets < end)
        base = cache + (start + offsets) * (2 * KV * DIM) + head * DIM
        key = tl.load(base[None, :] + dims[:, None], mask=seen[None, :] & (dims < DIM)[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A block without a row that is seen leaves the maximum at minus infinity.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        value = tl.load(base[:, None] + KV * DIM + dims[None, :], mask=seen[:, None] & (dims < DIM)[None, :], other=0.0)
        found = found * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    place = own * SPLITS + split
    tl.store(tops + place, top, mask=members < GROUP)
    tl.store(totals + place, total, mask=members < GROUP)
    tl.store(sums + place[:, None] * DIM + dims[None, :], found, mask=inside)


@triton.jit
def join_kernel(sums, tops, totals, result, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr):
    own, dims, splits = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, SPLITS)
    top = tl.load(tops + own * SPLITS + splits)
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weights * tl.load(totals + own * SPLITS + splits), 0)
    places = (own * SPLITS + splits)[:, None] * DIM + dims[None, :]
    found = tl.load(sums + places, mask=(dims < DIM)[None, :], other=0.0)
    joined = tl.sum(found * weights[:, None], 0) / total
    tl.store(result + own * DIM + dims, joined.to(result.dtype.element_ty), mask=dims < DIM)


def attend(queries: Tensor, cache: Tensor, reach: Reach, scale: float) -> Tensor:
    """See `backend.drafter.attention.attend`."""
    queries = queries.contiguous()
    rows, heads, dim = queries.shape
    kv_heads = cache.shape[2]
    group = heads // kv_heads
    splits = min(triton.next_power_of_2(triton.cdiv(PROGRAMS, max(rows * kv_heads, 1))), MOST_SPLITS)
    padded, wide = (max(triton.next_power_of_2(each), 16) for each in (group, dim))
    tops = torch.empty(rows, heads, splits, dtype=torch.float32, device=queries.device)
    totals, sums = torch.empty_like(tops), torch.empty(*tops.shape, dim, dtype=torch.float32, device=queries.device)
    result = torch.empty_like(queries)
    if rows:
        attend_kernel[(rows, kv_heads, splits)](
            queries, cache, *reach.columns(), sums, tops, totals, scale,
            KV=kv_heads, GROUP=group, DIM=dim, PADDED=padded, WIDE=wide, SPLITS=splits, BLOCK=BLOCK,
        )  # fmt: skip
        join_kernel[(rows * heads,)](sums, tops, totals, result, DIM=dim, WIDE=wide, SPLITS=splits)
    return result
