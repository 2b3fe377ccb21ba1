"""Which draft tokens a step verifies: those most likely to be accepted, as many as pay.  Pure; scheduler's process and thread.

A draft token is accepted with its survival S, the product of the chances up to it.  A step over B requests with N draft tokens
takes T(base + N) and emits B + sum S tokens.  S falls along a request, so the N tokens with the largest S are whole prefixes.
The best N makes (B + sum S) / T(base + N) largest, as DSpark's adaptive verification has it.  T is not convex: every N counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul


def survivals(chances: Iterable[float]) -> list[float]:
    """Of a draft whose tokens have these chances, each given that all before it were accepted."""
    return list(accumulate(chances, mul))


@dataclass(frozen=True)
class Spent:
    """A step's draft tokens."""

    lengths: list[int]
    """Tokens to verify per request: its draft cut there."""
    threshold: float
    """The survival that would just pay for one token more; between the smallest taken and the largest left out."""
    tokens: int
    """N, the sum of the lengths."""
    gained: float
    """Sum of the survivals taken: draft tokens expected to be accepted."""
    seconds: float
    """T(base + N)."""


def spend(survivals: Sequence[Sequence[float]], times: Sequence[float]) -> Spent:
    """The draft tokens that pay.

    `survivals`: per decoding request, an empty one without a draft.  `times`: T(base), T(base + 1), .. in seconds, up to one
    token more at least than there are.
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
    price = best_rate * (times[best + 1] - times[best])
    left_out = ranked[best][0] if best < len(ranked) else 0.0
    threshold = max(left_out, min(price, ranked[best - 1][0] if best else 1.0))
    return Spent(lengths, threshold, best, best_emitted - len(survivals), times[best])
