"""The duration of a step as a linear function of its number of requests.  Pure.

A verifier notes its steps, a drafter its batches; both report the line through them.  Balancing and the assignment of drafters
read that line and measure nothing themselves.  Duration by number of *tokens* stays inside a verifier, which decides with it
how many draft tokens to verify (`backend/speculation/step_times.py`).
"""

import msgspec

KEEP = 0.995
"""Factor on the weight of earlier steps at each new step; it halves their weight in 138 steps."""
PRIOR_STEPS = 20.0
"""Weight, in steps, of the assumption below, which hardly counts once batches of different sizes were measured."""
PRIOR_SHARE = 0.5
"""Share of a step's time that is assumed to grow with its requests, while all batches had the same size."""
RESPONSE_TOKENS = 128.0
"""Assumed length of a response, in tokens, until the first response has ended."""


class Speed(msgspec.Struct, frozen=True, gc=False):
    """A step over n requests takes `fixed_s + n * per_request_s` seconds, waiting for drafts included."""

    fixed_s: float
    per_request_s: float
    tokens: float = 1.0
    """Tokens that each request gains per step; for a verifier, the mean acceptance length."""

    def step_s(self, requests: float) -> float:
        """Seconds of a step over this many requests."""
        return self.fixed_s + requests * self.per_request_s


class Line:
    """A line through (requests, seconds) of past steps, by least squares; older steps have less weight."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = self._tokens = 0.0

    def note(self, requests: int, seconds: float, tokens: float = 0.0) -> None:
        """Adds a step; `tokens` is what all its requests together gained."""
        if requests < 1 or seconds <= 0:
            return
        self._weight = KEEP * self._weight + 1
        self._x = KEEP * self._x + requests
        self._y = KEEP * self._y + seconds
        self._xx = KEEP * self._xx + requests * requests
        self._xy = KEEP * self._xy + requests * seconds
        self._tokens = KEEP * self._tokens + tokens

    def read(self) -> Speed | None:
        """The current line; None before the first step."""
        if not self._weight:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        prior = PRIOR_SHARE * y / x
        spread = max(self._xx - self._weight * x * x, 0.0)
        slope = (self._xy - self._weight * x * y + PRIOR_STEPS * prior) / (spread + PRIOR_STEPS)
        slope = min(max(slope, 0.0), y / x)
        return Speed(y - slope * x, slope, max(self._tokens / self._x, 1.0))


def mean_speed(known: list[Speed]) -> Speed | None:
    """The mean of known speeds, assumed for a member that has made no step yet; None if none is known."""
    fields = zip(*map(msgspec.structs.astuple, known), strict=True)
    return Speed(*(sum(values) / len(known) for values in fields)) if known else None
