"""Learns how long a step takes by its tokens, and how long a draft takes.  Pure; scheduler's process and thread.

Steps are sorted into buckets by their tokens, two per octave.  The logarithm of a step's time is its bucket's mean, plus the
machine's speed, which all buckets share, plus two costs.  Asking drafters costs time: messages, features, shared cores and
memory.  So does verifying drafts, however few: more kernels, and tables of what to verify.  All are running means.  Each takes
its part of a surprise, the less the more steps it has seen, and leaves the rest to the next; the speed, a mean over few steps,
is last and takes most.  So buckets not met for long keep their relation to the others.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

MOST, MOST_OF_SPEED = 100.0, 5.0
"""Steps after which a mean becomes an exponentially weighted one.  The machine's speed may change by 15 % within 25 steps."""
LASTS = 2000.0
"""Steps after which what was not measured meanwhile counts for half."""
UNPROVEN = 8.0
"""A bucket of fewer steps may be slow by chance.  A verifier's start brings six steps of each size."""
HICCUP = 0.3
"""Surprises are cut to 30 %, so that one hiccup does not move the curve far."""
SHARE, SHARE_STEPS = 0.25, 0.2
"""Share of a step's time that is assumed to grow with its tokens, as if 0.2 steps without tokens had shown it."""
FAR = 2.0**24
"""More tokens than any step has."""


@dataclass
class _Mean:
    """A running mean of logarithms of times."""

    level: float = 0.0
    steps: float = 1.0
    """How many it is over; costs begin as if one step without them had been seen."""
    most: float = MOST
    at: int = 0
    """The latest step."""
    tokens: float = 0.0
    """Mean tokens of a bucket's steps."""

    def weight(self, clock: int) -> float:
        """Its steps, which count for less with the time since the latest."""
        return self.steps / (1 + (clock - self.at) / LASTS)

    def take(self, surprise: float, clock: int) -> float:
        """Takes its part of a surprise; returns the rest."""
        self.steps, self.at = min(self.weight(clock) + 1, self.most), clock
        self.level += surprise / self.steps
        return surprise * (1 - 1 / self.steps)


class StepTimes:
    """T(tokens) in seconds: straight lines between the buckets.  T never falls."""

    def __init__(self) -> None:
        self.asking = False
        """Whether drafters are asked in the steps that are observed, and in those that are predicted."""
        self._buckets: dict[int, _Mean] = {}
        self._asking, self._verifying = _Mean(), _Mean()
        self._speed, self._clock = _Mean(steps=0.0, most=MOST_OF_SPEED), 0
        self._xs, self._ys, self._stale = [0.0, FAR], [1e-3, 1e-3], False  # Before anything was measured.

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._buckets)

    def observe(self, tokens: float, seconds: float, drafted: int = 0) -> None:
        """Takes the measured time of one step over `tokens` tokens, of which `drafted` are draft tokens."""
        if tokens < 1 or seconds <= 0:
            return
        self._clock += 1
        self._stale = True
        costs = [cost for cost, counts in ((self._asking, self.asking), (self._verifying, drafted > 0)) if counts]
        level = math.log(seconds) - self._speed.level - sum(cost.level for cost in costs)
        bucket = self._buckets.setdefault(round(2 * math.log2(tokens)), _Mean(level, steps=0.0))
        surprise = level - bucket.level
        if surprise < -2 * HICCUP and bucket.weight(self._clock) < UNPROVEN:
            # Noise only makes steps slower: the unproven bucket was too high.
            bucket.level, surprise = level, 0.0
        rest = bucket.take(max(-HICCUP, min(surprise, HICCUP)), self._clock)
        bucket.tokens += (tokens - bucket.tokens) / bucket.steps
        for cost in costs:
            rest = cost.take(rest, self._clock)
            cost.level = max(cost.level, 0.0)
        self._speed.take(rest, self._clock)

    def doubt(self) -> None:
        """The next steps measure anew how fast the machine is, and what asking and verifying cost."""
        self._speed.steps = self._asking.steps = self._verifying.steps = 1.0

    def at(self, base: float, drafted: float = 0.0, asking: bool | None = None, prefill: int = 0) -> float:
        """The predicted seconds of a step over `base` tokens and `drafted` draft tokens.

        `asking`: of one in which drafters are asked, or are not.  Less than one draft token on average: some steps have none.
        `prefill`: prompt tokens in the same step.  Draft tokens cost what they do on top of these, whose own time is left out:
        it is spent in any case, and all else would look cheap beside it.
        """
        if self._stale:
            self._draw()
        factor = self._factor(self.asking if asking is None else asking, min(drafted, 1.0))
        return factor * (self._level(base + prefill + drafted) - self._prompt(base, prefill))

    def row(self, base: int, count: int, prefill: int = 0) -> npt.NDArray[np.float64]:
        """The predictions of `at` for 0, 1, ... draft tokens: `count` of them."""
        none = self.at(base)
        levels = np.interp(np.arange(base + prefill, base + prefill + count), self._xs, self._ys)
        found: npt.NDArray[np.float64] = self._factor(self.asking, 1.0) * (levels - self._prompt(base, prefill))
        found[:1] = none
        return found

    def _level(self, tokens: float) -> float:
        i = bisect_right(self._xs, tokens, hi=len(self._xs) - 1)
        (x, right), (y, above) = self._xs[i - 1 : i + 1], self._ys[i - 1 : i + 1]
        return y + (above - y) * (tokens - x) / (right - x)

    def _prompt(self, base: float, prefill: int) -> float:
        return self._level(base + prefill) - self._level(base) if prefill else 0.0

    def _factor(self, asking: bool, verifying: float) -> float:
        """What speed and costs make of the curve.  `verifying`: share of steps that verify drafts."""
        # While no draft is verified, this cost is not measured: with time it counts for less, so that drafts are tried again.
        cost = math.exp(self._verifying.level * self._verifying.weight(self._clock) / self._verifying.steps)
        return math.exp(self._speed.level + asking * self._asking.level) * (1 + verifying * (cost - 1))

    def _draw(self) -> None:
        """Computes the curve from the buckets.

        No bucket is above a larger one, nor, if unproven, above the straight line through all: the budget would avoid such
        steps and never learn better.
        """
        self._stale = False
        buckets = sorted(self._buckets.values(), key=lambda bucket: bucket.tokens)
        xs, ys = [bucket.tokens for bucket in buckets], [math.exp(bucket.level) for bucket in buckets]
        weights = [min(bucket.weight(self._clock), UNPROVEN) for bucket in buckets]
        start, slope = _line(xs, ys, weights)
        ys = [min(y, start + slope * x) if weight < UNPROVEN else y for x, y, weight in zip(xs, ys, weights, strict=True)]
        ys = list(accumulate(reversed(ys), min))[::-1]
        # Outside the buckets the line's slope holds, but time grows at most in proportion to tokens.
        first, last = min(slope, ys[0] / xs[0]), min(slope, ys[-1] / xs[-1])
        self._xs, self._ys = [0.0, *xs, FAR], [max(ys[0] - first * xs[0], 0.0), *ys, ys[-1] + last * (FAR - xs[-1])]


class DraftTimes:
    """Seconds from asking for drafts to having them: a pass per draft token, and the way (all else).

    The first pass is that over new text.  Drafts made ahead take one more, over the tokens under verification.  With `one_pass`
    there is one pass, over all tokens of all drafts.  One curve serves all: what one load shows of the drafter's speed holds at
    another.
    """

    def __init__(self, one_pass: bool = False) -> None:
        self._one_pass = one_pass
        self._passes = StepTimes()
        self._way_s: float | None = None

    def observe(self, rows: int, k: int, computed_s: float, waited_s: float) -> None:
        """Takes the times of drafts of at most `k` tokens for `rows` requests: compute, and from question to answer."""
        way_s = max(waited_s - computed_s, 0.0)
        self._way_s = way_s if self._way_s is None else self._way_s + 0.1 * (min(way_s, 3 * self._way_s + 1e-3) - self._way_s)
        self._observe(rows, k, computed_s, ahead=False)

    def enumerated(self, rows: int, k: int, computed_s: float) -> None:
        """Takes the time of drafting `rows` outcomes ahead, with drafts of at most `k` tokens."""
        self._observe(rows, k, computed_s, ahead=True)

    def at(self, rows: float, k: float) -> float:
        """The predicted seconds until drafts are there; 0 for no rows."""
        return self._predicted(rows, k, ahead=False)

    def ahead(self, rows: float, k: float) -> float:
        """The predicted seconds until drafts for `rows` outcomes are there."""
        return self._predicted(rows, k, ahead=True)

    def _observe(self, rows: int, k: int, computed_s: float, *, ahead: bool) -> None:
        wide, passes = self._shape(rows, k, ahead)
        self._passes.asking = ahead
        self._passes.observe(wide, computed_s / passes)

    def _predicted(self, rows: float, k: float, *, ahead: bool) -> float:
        wide, passes = self._shape(rows, k, ahead)
        return (self._way_s or 0.0) + passes * self._passes.at(wide, asking=ahead) if rows > 0 else 0.0

    def _shape(self, rows: float, k: float, ahead: bool) -> tuple[float, float]:
        """The rows of a pass, and the passes."""
        return (rows * (k + 1), 1) if self._one_pass else (rows, k + ahead)


def _line(xs: list[float], ys: list[float], weights: list[float]) -> tuple[float, float]:
    """Intercept and slope of the straight line through the points, fitted by relative distance; neither is negative.

    Few points, or close ones, say little about the slope: it is drawn to that of a step of which `SHARE` grows with its tokens.
    """
    fit = [weight / (y * y) for y, weight in zip(ys, weights, strict=True)]
    x, y = (sum(w * each for w, each in zip(fit, of, strict=True)) / sum(fit) for of in (xs, ys))
    prior = SHARE_STEPS * (x / y) ** 2
    spread = sum(w * (at - x) ** 2 for w, at in zip(fit, xs, strict=True))
    together = sum(w * (at - x) * (there - y) for w, at, there in zip(fit, xs, ys, strict=True))
    slope = max(0.0, min((together + prior * SHARE * y / x) / (spread + prior), y / x))
    return y - slope * x, slope
