"""Chooses the draft tokens that a step verifies: the likeliest ones, as many as pay.  Pure; scheduler's process and thread.

A draft token is accepted with its survival S, the product of the chances up to it.  A step over B requests with N draft tokens
takes T(B + N) and emits B + sum S tokens.  S falls along a request, so the N tokens with the largest S are whole prefixes.
The best N makes (B + sum S) / T(B + N) largest, as in DSpark's adaptive verification.  T is not convex: every N is tried.

That looks at all tokens of a draft.  A draft that was sampled may not be cut so, or the text would be biased: whether its token
i is verified may depend on the chances up to i, not on later ones, which depend on the token (docs/reference/drafting.md).
With such drafts in a step, `spend_in_order` goes down the ranking and stops at the first token that does not pay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from operator import itemgetter, mul

import numpy as np


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
    """T(B + N)."""


def spend_in_order(survivals: Sequence[Sequence[float]], expected: Spent, times: Sequence[float]) -> Spent:
    """Chooses the draft tokens that pay, reading a request's next survival only after the one before was taken.

    `expected`: the result of `spend` for survivals that may be read as a whole: for sampled drafts, what their first token's
    chance lets expect.  It decides whether any token is verified.  `times` as in `spend`; the token after n pays if it does
    along the greatest convex curve below `times`.
    """
    if not expected.tokens:
        return expected
    curve = _convex(times)
    emitted, lengths = float(len(survivals)), [0] * len(survivals)
    ranked = [(-row[0], i) for i, row in enumerate(survivals) if row]
    heapify(ranked)
    taken, last = 0, 1.0
    while ranked:
        s, i = -ranked[0][0], ranked[0][1]
        if taken and (emitted + s) * curve[taken] <= emitted * curve[taken + 1]:
            break
        emitted, taken, last = emitted + s, taken + 1, s
        lengths[i] += 1
        row = survivals[i]
        if lengths[i] < len(row):
            heapreplace(ranked, (-row[lengths[i]], i))
        else:
            heappop(ranked)
    price = emitted / curve[taken] * (curve[taken + 1] - curve[taken])
    left_out = -ranked[0][0] if ranked else 0.0
    threshold = max(left_out, min(price, last))
    return Spent(lengths, threshold, taken, emitted - len(survivals), times[taken])


def _convex(times: Sequence[float]) -> list[float]:
    """The greatest convex curve that is nowhere above `times[1:]`; entry 0 is that of 1.  Verifying any draft has been paid."""
    ys = np.array(times)
    # Corners are only where `times` turns up, by more than rounding: at few places, since T is made of straight lines.
    turns = np.nonzero(np.diff(ys[1:], 2) > 8 * np.spacing(ys[-1]))[0] + 2
    corners: list[int] = []
    for n in [*range(1, len(ys))[:1], *turns.tolist(), len(ys) - 1]:
        while len(corners) > 1:
            a, b = corners[-2:]
            if (times[b] - times[a]) * (n - b) < (times[n] - times[b]) * (b - a):
                break
            corners.pop()
        corners.append(n)
    curve: list[float] = np.interp(np.arange(len(ys)), corners, ys[corners]).tolist()
    return curve


def spend(survivals: Sequence[Sequence[float]], times: Sequence[float]) -> Spent:
    """Chooses the draft tokens that pay.

    `survivals`: those of each decoding request's draft; empty without a draft.  `times`: T(B), T(B + 1), ... in seconds,
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
