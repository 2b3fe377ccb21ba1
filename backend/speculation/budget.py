"""Chooses the draft tokens that a step verifies: the likeliest ones, as many as pay.  Pure; scheduler's process and thread.

A draft token is accepted with its survival S, the product of the chances up to it.  A step over B requests with N draft tokens
takes T(B + N) and emits B + sum S tokens.  S falls along a request, so the N tokens with the largest S are whole prefixes.
The best N makes (B + sum S) / T(B + N) largest, as in DSpark's adaptive verification.  T is not convex: every N is tried.

That looks at all tokens of a draft.  A draft that was sampled may not be cut so, or the text would be biased: whether its token
i is verified may depend on the chances up to i, not on later ones, which depend on the token (docs/reference/drafting.md).
With such drafts in a step, `spend_in_order` goes down the ranking and stops at the first token that does not pay.  S falls
along a draft, so what is ranked before a token comes before it in its draft or belongs to other requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backend.noise.cpu import compiled

Floats = npt.NDArray[np.float64]


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


def spend_in_order(survivals: Sequence[Sequence[float]], expected: Spent, times: Sequence[float] | Floats) -> Spent:
    """Chooses the draft tokens that pay, down to the first one in the ranking that does not.

    `expected`: the result of `spend` for survivals that may be read as a whole: for sampled drafts, what their first token's
    chance lets expect.  It decides whether any token is verified.  `times` as in `spend`; the token after n pays if it does
    along the greatest convex curve below `times`.
    """
    return _spent(_spend_in_order, survivals, times) if expected.tokens else expected


def spend(survivals: Sequence[Sequence[float]], times: Sequence[float] | Floats) -> Spent:
    """Chooses the draft tokens that pay.

    `survivals`: those of each decoding request's draft; empty without a draft.  `times`: T(B), T(B + 1), ... in seconds,
    at least two entries more than there are draft tokens.
    """
    return _spent(_spend, survivals, times)


def _spent(kernel: Callable[..., Any], survivals: Sequence[Sequence[float]], times: Sequence[float] | Floats) -> Spent:
    """Ranks the draft tokens, and lets `kernel` choose."""
    counts = [len(row) for row in survivals]
    flat = np.fromiter(chain.from_iterable(survivals), float, sum(counts))
    order, lengths, ys = (-flat).argsort(kind="stable"), np.zeros(len(counts), np.int64), np.asarray(times, float)
    ranked = flat[order]
    taken, emitted, price = kernel(ranked, np.arange(len(counts)).repeat(counts)[order], ys, lengths)
    left_out = float(ranked[taken]) if taken < len(ranked) else 0.0
    threshold = max(left_out, min(price, float(ranked[taken - 1]) if taken else 1.0))
    return Spent(lengths.tolist(), threshold, taken, emitted - len(counts), float(ys[taken]))


class KvBlocks(NamedTuple):
    """The KV cache's memory, which several groups of layers may share."""

    free: int
    sizes: Sequence[int]
    """Tokens per block, of each group."""
    behind: int = 0
    """Tokens behind a request's last for which it also needs room."""


def draft_limits(
    lengths: Sequence[int], longest: int, step_tokens: int, blocks: KvBlocks, others: int = 0, prefill: int = 0
) -> list[int] | None:
    """The most draft tokens that each decoding request, of so many tokens, may have in the next step; None: any number.

    If a request is preempted or its draft is cut because drafts need room, that depends on the drafts' lengths, and so on
    sampled tokens.  Where there might not be room for all drafts of `longest` tokens, they get only what changes nothing: the
    rest of the block that the request's own token takes anyway, and equal parts of the step's `step_tokens`.  `others` requests
    compute at most `prefill` prompt tokens.
    """
    most = max(min(longest, step_tokens // max(len(lengths), 1) - 1), 0)
    # Of n more tokens, those of a decoding request touch n / size new blocks at most, rounded up; those of a prompt one more.
    needed = sum(
        len(lengths) * -(-(1 + longest + blocks.behind) // size) + prefill // size + 2 * (others + 1) for size in blocks.sizes
    )
    if needed <= blocks.free:
        return None if most == longest else [most] * len(lengths)
    return [min(most, *(-(length + blocks.behind) % size for size in blocks.sizes)) for length in lengths]


@compiled
def _spend(ranked: Any, owners: Any, times: Any, lengths: Any) -> Any:
    """`spend` of survivals that fall: adds to `lengths`; returns N, the tokens emitted, and the price of one more."""
    emitted = best_emitted = float(len(lengths))
    best, best_rate = 0, emitted / times[0]
    for n in range(len(ranked)):
        emitted += ranked[n]
        if emitted > best_rate * times[n + 1]:
            best, best_rate, best_emitted = n + 1, emitted / times[n + 1], emitted
    for n in range(best):
        lengths[owners[n]] += 1
    # The first draft token's time has the cost of verifying any.
    at = max(best, min(len(ranked), 1))
    return best, best_emitted, best_rate * (times[at + 1] - times[at])


@compiled
def _spend_in_order(ranked: Any, owners: Any, times: Any, lengths: Any) -> Any:
    """`spend_in_order`, as `_spend`."""
    curve = _convex(times)
    emitted, taken = float(len(lengths)), 0
    for n in range(len(ranked)):
        if n and (emitted + ranked[n]) * curve[n] <= emitted * curve[n + 1]:
            break
        emitted, taken = emitted + ranked[n], n + 1
        lengths[owners[n]] += 1
    return taken, emitted, emitted / curve[taken] * (curve[taken + 1] - curve[taken])


@compiled
def _convex(times: Any) -> Any:
    """The greatest convex curve that is nowhere above `times[1:]`; entry 0 is that of 1.  Verifying any draft has been paid."""
    corners = np.empty(len(times), np.int64)
    count = 0
    for n in range(1, len(times)):
        while count > 1:
            a, b = corners[count - 2], corners[count - 1]
            if (times[b] - times[a]) * (n - b) < (times[n] - times[b]) * (b - a):
                break
            count -= 1
        corners[count] = n
        count += 1
    curve = np.empty(len(times))
    curve[0] = curve[1] = times[1]
    for i in range(1, count):
        a, b = corners[i - 1], corners[i]
        for n in range(a + 1, b + 1):
            curve[n] = times[a] + (times[b] - times[a]) / (b - a) * (n - a)
    return curve
