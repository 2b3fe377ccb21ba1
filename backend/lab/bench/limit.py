"""How fast drafting could be with the measured acceptance and step times.  Pure.

With drafts of K tokens that are always there, and no work besides steps, B requests emit B + sum S tokens per step of B + B K
tokens, S being the shares of drafts accepted up to each place.  The limit is the best over K, relative to plain steps.  K is
the same for all requests: a budget that knows which tokens are sure can pass the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

StepSeconds = Callable[[float], float]
"""Seconds of a step, by its tokens."""


def limit(requests: int, shares: Sequence[float], step_s: StepSeconds) -> float:
    """The best speed relative to plain steps; 1 if no draft pays.  `shares`: of drafts, those accepted up to each place."""
    emitted = enumerate(accumulate(shares, initial=1.0))
    return max(step_s(requests) * tokens / step_s(requests * (1 + k)) for k, tokens in emitted)


def step_times(steps: Iterable[tuple[float, float]]) -> StepSeconds | None:
    """The straight line through measured steps (tokens, seconds), by least squares of relative errors; None: too few sizes.

    Neither the fixed time nor a token's is negative.
    """
    known = [(x, y) for x, y in steps if x > 0 and y > 0]
    if len({round(x) for x, _ in known}) < 2:
        return None
    total = sum(1 / y**2 for _, y in known)
    x0, y0 = (sum(point[i] / point[1] ** 2 for point in known) / total for i in (0, 1))
    slope = sum((x - x0) * (y - y0) / y**2 for x, y in known) / sum((x - x0) ** 2 / y**2 for x, y in known)
    slope = max(0.0, min(slope, y0 / x0))
    return lambda tokens: y0 + slope * (tokens - x0)
