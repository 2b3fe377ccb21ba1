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

_kernel = triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["seeds", "positions", "ids"])
"""Otherwise a kernel is compiled again once a size or an address is divisible by 16, or is not, and a request waits."""


@triton.jit
def noise_of(seed, position, token, domain):
    """G of one token or of many, float32.

    For U < 1/2 a GPU's logarithm is accurate.  Otherwise, with `w = 1 - U`, `-log U = 2 atanh(w / (2 - w))`, whose series is
    accurate even for U close to 1, where a GPU's logarithm is not.
    """
    w0, w1, w2, w3 = tl.philox(seed.to(tl.uint64, bitcast=True), (token >> 2).to(tl.uint32), position.to(tl.uint32), domain, 0)
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
def gumbel_kernel(seeds, positions, tokens, noise, size, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    places = row.to(tl.int64) * size + columns
    at = tl.load(tokens + places, mask=inside, other=0)
    found = noise_of(tl.load(seeds + row), tl.load(positions + row), at, DOMAIN)
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
        scores += scale * noise_of(tl.load(seeds + row), tl.load(positions + row), tokens, 0)
    return scores


@_kernel
def scores_kernel(logits, seeds, positions, betas, scales, ids, found, size, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = scores_of(logits, seeds, positions, betas, scales, ids, row, columns, size, HAS_IDS)
    tl.store(found + row.to(tl.int64) * size + columns, scores, mask=columns < size)


@_kernel
def choose_kernel(
    logits, seeds, positions, betas, scales, ids, best, second, chosen, size, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):
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


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor, domain: int) -> Tensor:
    """See `backend.noise.gumbel`."""
    rows, size = tokens.shape
    noise = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    if noise.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        grid = (rows, triton.cdiv(size, block))
        gumbel_kernel[grid](
            seeds.contiguous(), positions.contiguous(), tokens.contiguous(), noise, size, DOMAIN=domain, BLOCK=block
        )
    return noise


def _run(kernel, given: Sequence[Tensor], ids: Tensor | None, results: Sequence[Tensor]) -> None:
    """Runs a kernel over the blocks of all rows.  `given`: logits, seeds, positions, inverse temperatures and scales."""
    rows, size = given[0].shape
    if rows:
        inputs = [each.contiguous() for each in (*given, given[1] if ids is None else ids)]
        kernel[(rows, triton.cdiv(size, BLOCK))](*inputs, *results, size, HAS_IDS=ids is not None, BLOCK=BLOCK)


def choose(
    logits: Tensor, seeds: Tensor, positions: Tensor, betas: Tensor, scales: Tensor, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `backend.noise.choose`."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    second, chosen = torch.empty_like(best), torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    _run(choose_kernel, (logits, seeds, positions, betas, scales), ids, (best, second, chosen))
    scores, block = best.max(dim=1, keepdim=True)
    # Of equal blocks, the first; `max` does not promise which one it returns.
    block = (best == scores).to(torch.uint8).argmax(dim=1, keepdim=True)
    others = best.scatter(1, block, float("-inf")).amax(dim=1)
    runner_up = torch.maximum(second.gather(1, block).squeeze(1), others)
    scores = scores.squeeze(1)
    leads = torch.where(scores == float("-inf"), 0.0, scores - runner_up)
    return chosen.gather(1, block).squeeze(1), scores, leads


def rank(
    logits: Tensor, seeds: Tensor, positions: Tensor, betas: Tensor, scales: Tensor, count: int, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `backend.noise.rank`."""
    found = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _run(scores_kernel, (logits, seeds, positions, betas, scales), ids, (found,))
    scores, columns = found.topk(count, dim=1)
    return columns, scores
