"""Attention and norms on a CPU: kernels compiled by Numba.  Attention reads keys and values in place.

Float32 throughout.  A call costs microseconds, where torch's attention costs tens of them for each sequence.
"""

from functools import partial
from typing import Any

import numpy as np

from backend.noise.cpu import compiled

_compiled = partial(compiled, loose=True)


_PER_NAT, _NATS = np.float32(1 / np.log(2.0)), np.float32(np.log(2.0))
_UNDERFLOW = np.float32(-87.0)
_TERMS = tuple(np.float32(1 / number) for number in (720, 120, 24, 6, 2))
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)


@_compiled
def _exp(value: Any) -> Any:
    """exp of a float32 up to 0, to 1e-6 of its value: a power of two and a polynomial, which LLVM vectorizes."""
    scaled = max(value, _UNDERFLOW) * _PER_NAT
    whole = np.floor(scaled + _HALF)
    rest = (scaled - whole) * _NATS
    a, b, c, d, e = _TERMS
    series = _ONE + rest * (_ONE + rest * (e + rest * (d + rest * (c + rest * (b + rest * a)))))
    return series * np.int32((np.int32(whole) + _BIAS) << _MANTISSA).view(np.float32)


@_compiled
def _place(index: int, bound: int, first: int, stride: int) -> int:
    """The `index`-th row that is attended to."""
    return index if index < bound else first + (index - bound) * stride


@_compiled
def attend(
    queries: Any, cache: Any, places: Any, starts: Any, bounds: Any, tails: Any, strides: Any, scale: float, result: Any
) -> None:
    """See `backend.drafter.attention.attend`; writes into `result`."""
    heads, dim = queries.shape[1], queries.shape[2]
    kv_heads = cache.shape[2]
    group = heads // kv_heads
    longest = 0
    for row in range(len(places)):
        longest = max(longest, places[row] - starts[row] + 1)
    scores = np.empty((group, longest), np.float32)
    for row in range(len(places)):
        start, bound, stride = starts[row], bounds[row], strides[row]
        behind = (places[row] - start - tails[row]) // stride
        first = places[row] - start - behind * stride
        count = bound + behind + 1
        for head in range(kv_heads):
            for i in range(count):
                key = cache[start + _place(i, bound, first, stride), 0, head]
                for member in range(group):
                    query = queries[row, head * group + member]
                    total = np.float32(0.0)
                    for d in range(dim):
                        total += query[d] * key[d]
                    scores[member, i] = total * np.float32(scale)
            for member in range(group):
                own = scores[member]
                top = own[0]
                for i in range(1, count):
                    top = max(top, own[i])
                weight = np.float32(0.0)
                for i in range(count):
                    own[i] = _exp(own[i] - top)
                    weight += own[i]
                for i in range(count):
                    own[i] /= weight
                result[row, head * group + member] = np.float32(0.0)
            for i in range(count):
                value = cache[start + _place(i, bound, first, stride), 1, head]
                for member in range(group):
                    share = scores[member, i]
                    target = result[row, head * group + member]
                    for d in range(dim):
                        target[d] += share * value[d]


@_compiled
def rms_norm(values: Any, weight: Any, eps: float, result: Any) -> None:
    """Divides each row of `values` by its root mean square, and multiplies it with `weight`; writes into `result`."""
    size = values.shape[1]
    for row in range(values.shape[0]):
        total = np.float32(0.0)
        for i in range(size):
            total += values[row, i] * values[row, i]
        factor = np.float32(1.0 / np.sqrt(total / size + eps))
        for i in range(size):
            result[row, i] = values[row, i] * factor * weight[i]
