"""Gumbel noise and sampling of tokens on a GPU: Triton kernels.  Any process; imported with the first CUDA tensor.

Each program writes the best score, its column and the second best score of one block of a row's columns; a few operations then
reduce over the blocks.  Nothing waits for the GPU.  Noise is computed for every column: that costs less than reading the logit.
"""

# Triton accepts no annotations except `constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
BLOCKS = 256
"""Blocks that are joined at once, at least: one kernel serves all usual vocabularies."""

_kernel = triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["seeds", "positions", "ids"])
"""Otherwise a kernel is compiled again once a size or an address is divisible by 16, or is not, and a request waits."""


@triton.jit
def noise_of(seed, position, token):
    """G of one token or of many, float32; the upper half of `position` is the domain.

    For U < 1/2 a GPU's logarithm is accurate.  Otherwise, with `w = 1 - U`, `-log U = 2 atanh(w / (2 - w))`, whose series is
    accurate even for U close to 1, where a GPU's logarithm is not.
    """
    at, domain = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed.to(tl.uint64, bitcast=True), (token >> 2).to(tl.uint32), at, domain, 0)
    place = token & 3
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3))).to(tl.uint32)
    lower = word < 2147483648
    u = (tl.where(lower, word, 1).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = ((word ^ 4294967295).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.where(lower, 0.5, w)
    s = w / (2.0 - w)
    q = s * s
    series = 1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15 + q * (1.0 / 17)))
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * series))))
    return -tl.log(tl.where(lower, -tl.log(u), 2.0 * s * series))


@_kernel
def gumbel_kernel(seeds, positions, tokens, noise, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    places = row.to(tl.int64) * size + columns
    at = tl.load(tokens + places, mask=inside, other=0)
    found = noise_of(tl.load(seeds + row), tl.load(positions + row), at)
    tl.store(noise + places, found, mask=inside)


@triton.jit
def scores_of(logits, seeds, positions, betas, scales, ids, row, columns, size, HAS_IDS: tl.constexpr):
    """The scores of a row at `columns`; minus infinity for columns outside the row."""
    inside = columns < size
    scores = tl.load(logits + row.to(tl.int64) * size + columns, mask=inside, other=float("-inf")).to(tl.float32)
    scores = scores * tl.load(betas + row)
    scale = tl.load(scales + row)
    if scale > 0:
        tokens = tl.load(ids + columns, mask=inside, other=0) if HAS_IDS else columns.to(tl.int64)
        scores += scale * noise_of(tl.load(seeds + row), tl.load(positions + row), tokens)
    return scores


@_kernel
def keys_kernel(logits, seeds, positions, betas, scales, ids, keys, size, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = scores_of(logits, seeds, positions, betas, scales, ids, row, columns, size, HAS_IDS)
    # As integers, scores have the same order, but for the two zeros.  Of equal scores, the first column has the largest key.
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    tl.store(keys + row.to(tl.int64) * size + columns, (order << 32) + (size - 1 - columns), mask=columns < size)


@_kernel
def choose_kernel(
    logits, seeds, positions, betas, scales, ids, best, second, chosen, tops, sums, size,
    HAS_IDS: tl.constexpr, TOTALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    scores = scores_of(logits, seeds, positions, betas, scales, ids, row, columns, size, HAS_IDS)
    top = tl.max(scores, 0)
    # Of equal scores, the first column; never a column outside the row, even if logits are NaN.
    place = tl.minimum(tl.min(tl.where((scores == top) & inside, columns, size), 0), size - 1)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, top)
    tl.store(chosen + at, place.to(tl.int64))
    tl.store(second + at, tl.max(tl.where(columns == place, float("-inf"), scores), 0))
    if TOTALS:
        whole = tl.load(logits + row.to(tl.int64) * size + columns, mask=inside, other=float("-inf")).to(tl.float32)
        whole *= tl.load(betas + row)
        most = tl.max(whole, 0)
        tl.store(tops + at, most)
        tl.store(sums + at, tl.sum(tl.exp(whole - tl.where(most == float("-inf"), 0.0, most)), 0))


@_kernel
def join_kernel(
    best, second, chosen, tops, sums, columns, scores, leads, totals, size, TOTALS: tl.constexpr, BLOCKS: tl.constexpr
):
    row, blocks = tl.program_id(0), tl.arange(0, BLOCKS)
    at, inside = row.to(tl.int64) * size + blocks, blocks < size
    bests = tl.load(best + at, mask=inside, other=float("-inf"))
    top = tl.max(bests, 0)
    # Of equal blocks, the first.
    block = tl.minimum(tl.min(tl.where((bests == top) & inside, blocks, BLOCKS), 0), size - 1)
    tl.store(columns + row, tl.load(chosen + row.to(tl.int64) * size + block))
    others = tl.max(tl.where(blocks == block, float("-inf"), bests), 0)
    runner_up = tl.maximum(tl.load(second + row.to(tl.int64) * size + block), others)
    tl.store(scores + row, top)
    tl.store(leads + row, tl.where(top == float("-inf"), 0.0, top - runner_up))
    if TOTALS:
        mosts = tl.load(tops + at, mask=inside, other=float("-inf"))
        most = tl.max(mosts, 0)
        safe = tl.where(most == float("-inf"), 0.0, most)
        parts = tl.load(sums + at, mask=inside, other=0.0) * tl.exp(mosts - safe)
        tl.store(totals + row, safe + tl.log(tl.sum(parts, 0)))


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """See `backend.noise.gumbel`."""
    rows, size = tokens.shape
    noise = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    if noise.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        grid = (rows, triton.cdiv(size, block))
        gumbel_kernel[grid](seeds.contiguous(), positions.contiguous(), tokens.contiguous(), noise, size, BLOCK=block)
    return noise


def _run(kernel, given: Sequence[Tensor], ids: Tensor | None, results: Sequence[Tensor], **constants: bool) -> None:
    """Runs a kernel over the blocks of all rows.  `given`: logits, seeds, positions, inverse temperatures and scales."""
    rows, size = given[0].shape
    if rows:
        inputs = [each.contiguous() for each in (*given, given[1] if ids is None else ids)]
        kernel[(rows, triton.cdiv(size, BLOCK))](*inputs, *results, size, HAS_IDS=ids is not None, BLOCK=BLOCK, **constants)


def choose(
    logits: Tensor, seeds: Tensor, positions: Tensor, betas: Tensor, scales: Tensor, ids: Tensor | None, totals: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See `backend.noise.choose`."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    second, tops, sums = torch.empty_like(best), torch.empty_like(best), torch.empty_like(best)
    chosen = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    _run(choose_kernel, (logits, seeds, positions, betas, scales), ids, (best, second, chosen, tops, sums), TOTALS=totals)
    scores = torch.empty(rows, dtype=torch.float32, device=logits.device)
    leads, found = torch.empty_like(scores), torch.empty_like(scores)
    columns = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        join_kernel[(rows,)](
            best, second, chosen, tops, sums, columns, scores, leads, found, blocks,
            TOTALS=totals, BLOCKS=max(triton.next_power_of_2(blocks), BLOCKS),
        )  # fmt: skip
    return columns, scores, leads, found if totals else None


def rank(
    logits: Tensor, seeds: Tensor, positions: Tensor, betas: Tensor, scales: Tensor, count: int, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `backend.noise.rank`."""
    keys = torch.empty(logits.shape, dtype=torch.int64, device=logits.device)
    _run(keys_kernel, (logits, seeds, positions, betas, scales), ids, (keys,))
    best = keys.topk(count, dim=1).values
    order = (best >> 32).int()
    scores = (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return logits.shape[1] - 1 - (best & 0xFFFFFFFF), scores
