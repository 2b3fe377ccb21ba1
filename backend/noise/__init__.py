"""The Gumbel noise that a verifier and its drafters share, and the sampling of tokens with it.  Any process and thread.

A request has a seed of 64 bits.  `G(seed, t, v)` is Gumbel noise for token `v` at absolute position `t`: the token that
maximises `log p(v) + G` is a sample of p.  The noise comes from a counter-based generator, Philox 4x32-10 (Salmon et al.,
SC11), so it can be computed from the seed for a single token.  The key is the seed's lower and upper half, the counter
`(v >> 2, t, domain, 0)`.  Token `v` takes word `v & 3` of the result, called `x`.  The noise above has domain 0.  Other domains
are independent of it: `uniforms` has domain 1, and `behind` others.  A position has its domain in its upper 32 bits.  Then

    U = (x + 1/2) / 2**32,    E = -log U,    G = -log E.

All are finite: G lies between -3.13 and 22.88.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from backend.noise import cpu

_JUDGING = 1
"""The domain of `uniforms`."""
_BITS = 32
"""A position's domain lies this many bits higher."""
_OWN_NUMBERS = np.empty((0, cpu.TILE), np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
"""The layout if a column's number is its token id: empty."""


class Chosen(NamedTuple):
    """The result of `choose`: tensors `[R]`, one item per row."""

    columns: Tensor
    """Int64: the column of the largest score; of equal scores, the first column."""
    scores: Tensor
    """Float32: the largest score; minus infinity if no column may win."""
    leads: Tensor
    """Float32: largest minus second largest score; infinity without a runner-up."""
    totals: Tensor | None = None
    """Float32, if wanted: the logarithm of the sum of `exp(logit * beta)`."""


def to_int64(seed: int) -> int:
    """An unsigned seed as the int64 of the same bits, as tensors hold it."""
    return seed - (1 << 64) if seed >> 63 else seed


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The noise of `tokens` int64 `[R, M]` at `positions` int64 `[R]` under `seeds` int64 `[R]`: float32 `[R, M]`."""
    if tokens.is_cuda:
        from backend.noise import cuda

        return cuda.gumbel(seeds, positions, tokens)
    noise = torch.empty(tokens.shape, dtype=torch.float32)
    cpu.gumbel(_int64(seeds), _int64(positions), _int64(tokens), noise.numpy())
    return noise


def uniforms(seeds: Tensor, lengths: Tensor, count: int) -> Tensor:
    """`count` numbers, uniform in (0, 1], for the verification that begins at each of `lengths` int64 `[R]`.

    They belong to the verification, not to positions of the text: block verification reads numbers beyond the token at which
    it stops.  They are independent of the tokens' noise under the same `seeds` int64 `[R]`.  Float32 `[R, count]`.
    """
    places = torch.arange(count, device=seeds.device).expand(len(seeds), count).contiguous()
    return torch.exp(-torch.exp(-gumbel(seeds, lengths + (_JUDGING << _BITS), places)))


def behind(lengths: Tensor, accepted: Tensor) -> Tensor:
    """The positions whose noise draws the token behind `accepted` draft tokens, in verifications that begin at `lengths`.

    Where draft tokens come before it, they have a domain by their number.  So no other verification reads this noise, and a
    drafter may look at it for every possible `accepted`: what it does with it cannot bias a later token.  Int64, any shape.
    """
    return lengths + accepted + torch.where(accepted > 0, accepted + _JUDGING, 0).bitwise_left_shift(_BITS)


def choose(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    betas: Tensor,
    scales: Tensor,
    token_ids: Tensor | None = None,
    totals: bool = False,
) -> Chosen:
    """For each row of `logits` `[R, V]`, the column with the largest score `logit * beta + scale * G`.  `totals`: these, too.

    `seeds` and `positions` are int64 `[R]`, `betas` (inverse temperatures, positive) and `scales` float32 `[R]`.  For a row of
    scale 0 no noise is computed.  `token_ids` int64 `[V]` are the columns' tokens, if not their numbers.  A logit of minus
    infinity never wins, unless all in the row are.
    """
    if logits.is_cuda:
        from backend.noise import cuda

        return Chosen(*cuda.choose(logits, seeds, positions, betas, scales, token_ids, totals))
    # Where V is 1, the CPU's kernel gives the second rank minus infinity.
    columns, scores = rank(logits, seeds, positions, betas, scales, 2, token_ids)
    best, second = scores.unbind(1)
    sums = (logits.float() * betas.unsqueeze(1)).logsumexp(1) if totals else None
    return Chosen(columns[:, 0], best, torch.where(best == float("-inf"), 0.0, best - second), sums)


def rank(
    logits: Tensor, seeds: Tensor, positions: Tensor, betas: Tensor, scales: Tensor, count: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The columns of each row's `count` largest scores, int64 `[R, count]`, and the scores, float32, in descending order.

    Of equal scores, the first column leads.  Scores and arguments as in `choose`; `count` is at most V.
    """
    if logits.is_cuda:
        from backend.noise import cuda

        return cuda.rank(logits, seeds, positions, betas, scales, count, token_ids)
    layout = _OWN_NUMBERS
    if token_ids is not None:
        ids = _int64(token_ids)
        tiles = -(-len(ids) // cpu.TILE)
        layout = np.empty((tiles, cpu.TILE), np.uint64), np.empty(tiles, np.int64), np.empty(len(ids), np.int64)
        cpu.lay_out(ids, *layout)
    given = _float32(logits), _int64(seeds), _int64(positions), _float32(betas), _float32(scales)
    columns, scores = np.empty((len(logits), count), np.int64), np.empty((len(logits), count), np.float32)
    cpu.rank(*given, layout, columns, scores)
    return torch.from_numpy(columns), torch.from_numpy(scores)


def _int64(tensor: Tensor) -> Any:
    return tensor.long().contiguous().numpy()


def _float32(tensor: Tensor) -> Any:
    # For any other dtype, Numba would compile the kernels again.
    return tensor.detach().float().contiguous().numpy()


def warm_up(device: torch.device) -> None:
    """Compiles the kernels for a device, so that no request waits for it; takes seconds the first time."""
    ids = torch.arange(2, device=device)
    ones = torch.ones(2, device=device)
    gumbel(ids, ids, ids.unsqueeze(1))
    for token_ids in (None, ids):
        choose(torch.zeros(2, 2, device=device), ids, ids, ones, ones, token_ids)
        rank(torch.zeros(2, 2, device=device), ids, ids, ones, ones, 2, token_ids)
