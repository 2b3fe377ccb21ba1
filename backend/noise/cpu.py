"""Gumbel noise and sampling of tokens on a CPU: Numba kernels that use one core and release the GIL.  Any process and thread.

`rank` avoids most logarithms.  `-log U >= 1 - U`, so `G <= -log(1 - U)`.  Because `log2(1 + m) >= m`, the bits of `1 - U` as a
float32 bound that logarithm from above.  A token whose bound is below the last score ranked so far needs no logarithm.  A tile
whose best logit with the largest possible noise is below that score needs no random words.  Rounding is monotone and both sides
round alike, so the bounds hold to the last bit.  (Therefore fused multiply-adds stay off.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite.binding import ffi

# vLLM's search for its kernels (0.32, `vllm/triton_utils/dispatcher.py`, `_rebind_kernels`) reads `__dict__` of every object in
# every module.  llvmlite's library handle takes `__dict__` for a function's name and raises: the verifier could not start.
ffi.lib._fntab.setdefault("__dict__", {})

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

TILE = 256
"""Tokens handled together: enough for vector instructions, few enough that their words stay in the L1 cache."""

_ONES = np.uint32(0xFFFFFFFF)
MOST_NOISE = np.float32(22.874)
"""Slightly more than 33 log 2, the largest possible noise."""
_PER_BIT = np.float32(np.log(2.0) / 2**23)
_BOUND = np.float32((32 + 127) * np.log(2.0) + 1e-3)
"""The bound of `-log(1 - U)` before the float's bits are subtracted; 0.001 covers rounding."""
_SIGN, _MAGNITUDE, _LEAST = np.int32(31), np.int32(0x7FFFFFFF), np.int32(-(2**31))
_NEVER = np.float32(-np.inf)


def compiled(kernel: Kernel, loose: bool = False) -> Kernel:
    """Compiles a kernel at its first call and caches the result on disk if possible.

    No result depends on NaN or the sign of zero; LLVM must know that (`nnan`, `nsz`) to vectorize maxima.  With `loose`, sums
    may be taken in any order, and are vectorized too.
    """
    fastmath = {"nnan", "nsz", *(("reassoc", "contract", "arcp") if loose else ())}
    options: dict[str, Any] = {"nogil": True, "fastmath": fastmath, "boundscheck": False}
    try:
        found: Kernel = numba.njit(cache=True, **options)(kernel)
    except RuntimeError:  # Numba found no writable directory for its cache.
        found = numba.njit(**options)(kernel)
    return found


@compiled
def fill_words(counters: Any, count: int, position: Any, seed: Any, words: Any) -> None:
    """Philox 4x32-10: writes the four `words` of each counter `(counters[i], position, domain, 0)`, `i` below `count`.

    The upper half of `position` is the domain.  Unsigned 64-bit integers hold the 32-bit values, so that LLVM vectorizes the
    loop.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(count):
        c0, c1, c2, c3 = counters[i], position & low, position >> half, np.uint64(0)
        k0, k1 = seed & low, seed >> half
        for _ in range(10):
            p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
            c0, c2 = (p1 >> half) ^ c1 ^ k0, (p0 >> half) ^ c3 ^ k1
            c1, c3 = p1 & low, p0 & low
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = c0, c1, c2, c3


@compiled
def noise_of(word: Any) -> Any:
    """G of one word.  Float64 keeps both logarithms accurate for U close to 0 or 1; the result is float32."""
    u = (np.float64(word) + 0.5) * 2.0**-32
    return np.float32(-np.log(-np.log(u)))


@compiled
def gumbel(seeds: Any, positions: Any, tokens: Any, noise: Any) -> None:
    """Writes the noise of `tokens` `[R, M]` into `noise` `[R, M]`."""
    words = np.empty(4, np.uint32)
    counter = np.empty(1, np.uint64)
    for row in range(tokens.shape[0]):
        for column in range(tokens.shape[1]):
            token = tokens[row, column]
            counter[0] = np.uint64(token >> 2)
            fill_words(counter, 1, np.uint64(positions[row]), np.uint64(seeds[row]), words)
            noise[row, column] = noise_of(words[token & 3])


@compiled
def lay_out(ids: Any, counters: Any, counts: Any, slots: Any) -> None:
    """Writes the counters that each tile of `ids` needs, and where each column's word will be.

    Neighbouring ids of one counter share it.  `counters` `[tiles, TILE]`; `counts` `[tiles]`: how many per tile; `slots` `[V]`:
    indices into the tile's words.
    """
    for tile in range(counts.shape[0]):
        count = 0
        for column in range(tile * TILE, min((tile + 1) * TILE, ids.shape[0])):
            counter = np.uint64(ids[column] >> 2)
            if count == 0 or counters[tile, count - 1] != counter:
                counters[tile, count] = counter
                count += 1
            slots[column] = 4 * (count - 1) + (ids[column] & 3)
        counts[tile] = count


@compiled
def tile_maxima(logits: Any, maxima: Any) -> int:
    """Writes every tile's largest logit; returns the tile with the largest of all."""
    best = 0
    for tile in range(maxima.shape[0]):
        # Logits are mapped to integers of the same order, because LLVM vectorizes their maximum.
        top = _LEAST
        here = logits[tile * TILE : (tile + 1) * TILE]
        for i in range(here.shape[0]):
            bits = np.float32(here[i]).view(np.int32)
            top = max(top, np.int32(bits ^ ((bits >> _SIGN) & _MAGNITUDE)))
        maxima[tile] = np.int32(top ^ ((top >> _SIGN) & _MAGNITUDE)).view(np.float32)
        if maxima[tile] > maxima[best]:
            best = tile
    return best


@compiled
def fill_bounds(logits: Any, beta: Any, scale: Any, words: Any, bounds: Any, least: Any) -> int:
    """Writes an upper bound of each score of the tile; returns how many bounds reach `least`."""
    reached = 0
    for i in range(logits.shape[0]):
        bits = np.float32(words[i] ^ _ONES).view(np.int32)
        bound = logits[i] * beta + scale * (_BOUND - np.float32(bits) * _PER_BIT)
        bounds[i] = bound
        reached += bound >= least
    return reached


@compiled
def rank(logits: Any, seeds: Any, positions: Any, betas: Any, scales: Any, layout: Any, columns: Any, scores: Any) -> None:
    """Writes each row's F largest scores, in descending order, and their columns, `[R, F]`; ranks beyond V get minus infinity.

    `layout` has `counters`, `counts` and `slots` of `lay_out`; if `slots` is empty, a column's number is its token id.
    """
    all_counters, counts, slots = layout
    size, worst = logits.shape[1], columns.shape[1] - 1
    tiles = (size + TILE - 1) // TILE
    words = np.empty(4 * TILE, np.uint32)
    drawn = np.empty(TILE, np.uint32)
    bounds = np.empty(TILE, np.float32)
    maxima = np.empty(tiles, np.float32)
    counters = np.empty(TILE, np.uint64)
    for row in range(logits.shape[0]):
        beta, scale, position, seed = betas[row], scales[row], np.uint64(positions[row]), np.uint64(seeds[row])
        first = tile_maxima(logits[row], maxima)
        for place in range(worst + 1):
            columns[row, place], scores[row, place] = size, _NEVER
        # `turn` 0 is the tile of the largest logit, so that bounds exclude more; then the other tiles in order.
        for turn in range(tiles + 1):
            tile = first if turn == 0 else turn - 1
            if turn and tile == first:
                continue
            if maxima[tile] * beta + scale * MOST_NOISE < scores[row, worst]:
                continue
            start = tile * TILE
            here = logits[row, start : start + TILE]
            used = words
            if scale > 0:
                if slots.shape[0]:
                    fill_words(all_counters[tile], counts[tile], position, seed, words)
                    for i in range(here.shape[0]):
                        drawn[i] = words[slots[start + i]]
                    used = drawn
                else:
                    for i in range(TILE // 4):
                        counters[i] = np.uint64(start // 4 + i)
                    fill_words(counters, TILE // 4, position, seed, words)
                if not fill_bounds(here, beta, scale, used, bounds, scores[row, worst]):
                    continue
            else:
                for i in range(here.shape[0]):
                    bounds[i] = here[i] * beta
            for i in range(here.shape[0]):
                if bounds[i] >= scores[row, worst]:
                    score = here[i] * beta + scale * noise_of(used[i]) if scale > 0 else bounds[i]
                    insert(columns[row], scores[row], start + i, score)
        for place in range(worst + 1):
            # Only matters if logits are NaN: the result must be a column even then.
            columns[row, place] = min(columns[row, place], size - 1)


@compiled
def insert(columns: Any, scores: Any, column: int, score: Any) -> None:
    """Inserts a column into the ranking if its score suffices.  Of equal scores, the first column leads."""
    place = columns.shape[0]
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and column < columns[place - 1])):
        if place < columns.shape[0]:
            columns[place], scores[place] = columns[place - 1], scores[place - 1]
        place -= 1
    if place < columns.shape[0]:
        columns[place], scores[place] = column, score
