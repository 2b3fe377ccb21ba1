"""Chooses the draft tokens that a step verifies: the likeliest ones, as many as pay.  Pure; scheduler's process and thread.

A draft token is accepted with its survival S, the product of the chances up to it.  A step over B requests with N draft tokens
takes T(base + N) and emits B + sum S tokens.  S falls along a request, so the N tokens with the largest S are whole prefixes.
The best N makes (B + sum S) / T(base + N) largest, as in DSpark's adaptive verification.  T is not convex: every N is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul


def survivals(chances: Iterable[float]) -> list[float]:
    """The survivals of a draft's tokens, from their chances (each given that all tokens before it are accepted)."""
    return list(accumulate(chances, mul))


@dataclass(frozen=True)
class Spent:
    """The draft tokens chosen for a step."""

    lengths: list[int]
    """Draft tokens to verify per request."""
    threshold: float
    """The survival at which one more token would just pay; between the smallest taken and the largest left out."""
    tokens: int
    """N, the sum of the lengths."""
    gained: float
    """Sum of the survivals taken: draft tokens expected to be accepted."""
    seconds: float
    """T(base + N)."""


def spend(survivals: Sequence[Sequence[float]], times: Sequence[float]) -> Spent:
    """Chooses the draft tokens that pay.

    `survivals`: those of each decoding request's draft; empty without a draft.  `times`: T(base), T(base + 1), ... in seconds,
    at least two entries more than there are draft tokens.
    """
    ranked = [(s, i) for i, row in enumerate(survivals) for s in row]
    ranked.sort(key=itemgetter(0), reverse=True)
    emitted = best_emitted = float(len(survivals))
    best, best_rate = 0, emitted / times[0]
    for n, ((s, _), seconds) in enumerate(zip(ranked, times[1:], strict=False), 1):
        emitted += s
        if emitted > best_rate * seconds:
            best, best_rate, best_emitted = n, emitted / seconds, emitted
    lengths = [0] * len(survivals)
    for _, i in ranked[:best]:
        lengths[i] += 1
    # The first draft token's time has the cost of verifying any.
    at = max(best, min(len(ranked), 1))
    price = best_rate * (times[at + 1] - times[at])
    left_out = ranked[best][0] if best < len(ranked) else 0.0
    threshold = max(left_out, min(price, ranked[best - 1][0] if best else 1.0))
    return Spent(lengths, threshold, best, best_emitted - len(survivals), times[best])
