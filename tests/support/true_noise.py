"""The shared noise computed from its definition, one random word at a time.  Tests only."""

import math


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox 4x32-10, as in its paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def true_gumbel(seed: int, position: int, token: int, domain: int = 0) -> float:
    """The Gumbel noise of a token, G in domain 0; `seed` is unsigned."""
    word = philox((token >> 2, position, domain, 0), (seed % 2**32, seed >> 32))[token & 3]
    return true_noise(word)


def true_noise(word: int) -> float:
    """The Gumbel noise G of a random 32-bit word."""
    w = (2**32 - 1 - word + 0.5) / 2**32
    return -math.log(-math.log1p(-w) if word >= 2**31 else -math.log((word + 0.5) / 2**32))
