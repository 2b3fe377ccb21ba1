"""How long a step takes over so many requests, measured where the steps are made and read by everyone else.  Pure.

A verifier notes each of its steps, a drafter each of its batches; both report the line through them.  Routing, balancing and
the assignment of drafters read that line and measure nothing of their own.  What a step takes by its *tokens* is a verifier's
own affair (`backend/speculation/step_times.py`): it decides how many draft tokens are verified.
"""

from __future__ import annotations

import msgspec

KEEP = 0.995
"""Weight that a step keeps when the next one comes: half of it after 138 steps."""
PRIOR_STEPS = 20.0
"""Weight, in steps, of the assumption below; it counts for nothing once batches of different sizes were seen."""
PRIOR_SHARE = 0.5
"""Share of a step's time that is taken to grow with its requests while all steps are alike."""
RESPONSE_TOKENS = 128.0
"""Assumed length of a response before the first one has ended."""


class Speed(msgspec.Struct, frozen=True, gc=False):
    """A step over n requests takes `fixed_s + n * per_request_s` seconds, waiting for drafts included."""

    fixed_s: float
    per_request_s: float
    tokens: float = 1.0
    """What each request gains in a step: a verifier's acceptance length."""

    def step_s(self, requests: float) -> float:
        """Seconds of a step over so many requests."""
        return self.fixed_s + requests * self.per_request_s


class Line:
    """The line through (requests, seconds) of past steps, by least squares; older steps weigh less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = self._tokens = 0.0

    def note(self, requests: int, seconds: float, tokens: float = 0.0) -> None:
        """One step, in which all requests together gained so many tokens."""
        if requests < 1 or seconds <= 0:
            return
        self._weight = KEEP * self._weight + 1
        self._x = KEEP * self._x + requests
        self._y = KEEP * self._y + seconds
        self._xx = KEEP * self._xx + requests * requests
        self._xy = KEEP * self._xy + requests * seconds
        self._tokens = KEEP * self._tokens + tokens

    def read(self) -> Speed | None:
        """None before the first step."""
        if not self._weight:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        prior = PRIOR_SHARE * y / x
        spread = max(self._xx - self._weight * x * x, 0.0)
        slope = (self._xy - self._weight * x * y + PRIOR_STEPS * prior) / (spread + PRIOR_STEPS)
        slope = min(max(slope, 0.0), y / x)
        return Speed(y - slope * x, slope, max(self._tokens / self._x, 1.0))


def mean_speed(known: list[Speed]) -> Speed | None:
    """What one that has not worked yet is taken for; None where nobody has."""
    if not known:
        return None
    n = len(known)
    return Speed(
        sum(each.fixed_s for each in known) / n,
        sum(each.per_request_s for each in known) / n,
        sum(each.tokens for each in known) / n,
    )
