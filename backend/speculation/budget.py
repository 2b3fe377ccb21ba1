"""Which draft tokens a step verifies: those most likely to be accepted, as many as pay.  Pure; scheduler's process and thread.

A draft token is accepted with its survival S, the product of the chances up to it.  A step over B requests with N draft tokens
takes T(base + N) and emits B + sum S tokens.  S falls along a request, so the N tokens with the largest S are whole prefixes.
The best N makes (B + sum S) / T(base + N) largest, as DSpark's adaptive verification has it.  T is not convex: every N counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter, mul

OWED, RANGE = -4.0, 8.0
"""Tokens a request may fall behind plain decoding before it counts, and those that are remembered either way."""


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


def spend(
    survivals: Sequence[Sequence[float]],
    step_s: Callable[[int], float],
    base: int,
    owed: Sequence[float] | None = None,
) -> Spent:
    """The draft tokens that pay.

    `survivals`: per decoding request, an empty one without a draft.  `base`: tokens of the step without drafts, with prefill.
    `owed`: credits as in `Fairness`; a request below `OWED` must itself gain from what is spent.
    """
    ranked = [(s, i) for i, row in enumerate(survivals) for s in row]
    ranked.sort(key=itemgetter(0), reverse=True)
    emitted = best_emitted = float(len(survivals))
    plain_s = best_s = step_s(base)
    best, best_rate = 0, emitted / plain_s
    behind = {i: 1.0 for i, credit in enumerate(owed) if credit < OWED} if owed is not None else {}
    bound = plain_s if behind else float("inf")
    for n, (s, i) in enumerate(ranked, 1):
        emitted += s
        if i in behind:
            behind[i] += s
            bound = plain_s * min(behind.values())
        seconds = step_s(base + n)
        if emitted > best_rate * seconds and seconds <= bound:
            best, best_rate, best_emitted, best_s = n, emitted / seconds, emitted, seconds
    lengths = [0] * len(survivals)
    for _, i in ranked[:best]:
        lengths[i] += 1
    price = best_rate * (step_s(base + best + 1) - best_s)
    left_out = ranked[best][0] if best < len(ranked) else 0.0
    threshold = max(left_out, min(price, ranked[best - 1][0] if best else 1.0))
    return Spent(lengths, threshold, best, best_emitted - len(survivals), best_s)


@dataclass
class Fairness:
    """How many tokens each request is ahead of what it is due, or behind (negative): others' draft tokens slow its steps.

    One request that cannot be drafted for keeps all others from being, if it is due all of plain decoding's rate.
    """

    due: float = 1.0
    """Share of plain decoding's rate that no request falls below in the long run."""
    credits: dict[str, float] = field(default_factory=dict)

    def stepped(self, request_id: str, emitted: int, step_s: float, plain_s: float) -> None:
        """A request emitted so much in `step_s` seconds, waiting for drafts included; without drafts it takes `plain_s`.

        Both are predictions of one curve: what a step really took would count the machine's slow moments as debt.
        """
        credit = self.credits.get(request_id, 0.0) + emitted - self.due * step_s / plain_s
        self.credits[request_id] = max(-RANGE, min(RANGE, credit))

    def owed(self, request_ids: Iterable[str]) -> list[float] | None:
        """For `spend`; None where nobody is far behind."""
        credits = [self.credits.get(request_id, 0.0) for request_id in request_ids]
        return credits if min(credits, default=0.0) < OWED else None

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self.credits.pop(request_id, None)
