"""Learns how long a step takes by its tokens, and how long a draft takes.  Pure; scheduler's process and thread.

The curve has a point for each size of step.  The logarithm of a step's time is its point's level, plus the machine's speed,
which all points share, plus two costs.  Asking drafters costs time: messages, features, shared cores and memory.  So does
verifying drafts, however few: more kernels, and tables of what to verify.  A Kalman filter splits each surprise
between these states by their variances, here called doubts: the speed wanders and takes most of it, but a new point takes all.
So old points keep their relation to the others.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOISE = 0.1**2
"""Variance of one measurement.  On a quieter machine the estimates are no better than this allows, which is enough."""
WANDER = 0.03**2
"""Variance the machine's speed gains per step: it wanders by 15 % within some 25 steps."""
AGEING = 1e-6
"""Variance a point gains per step: 3 % in a thousand steps."""
UNFITTED = 0.05**2
"""Variance of true points about the straight line through all.  A point in more doubt is unproven: it may be slow by chance."""
HICCUP = 3.0
"""Surprises are cut to 3 standard deviations, so that one hiccup does not move the curve far."""
COST = 0.1**2
"""Variance at first of what asking, or verifying drafts, costs: steps may be 10 % longer, or more; they are never shorter."""
SHARE = 0.25
"""Assumed share of a step's time that grows with its tokens, until steps of several sizes were measured."""


@dataclass
class _Point:
    tokens: float
    level: float
    doubt: float
    at: int


@dataclass
class _Cost:
    """What the logarithm of a step's time gains by asking, or by verifying drafts."""

    level: float = 0.0
    doubt: float = COST
    at: int = 0

    def age(self, clock: int) -> None:
        self.doubt, self.at = self.doubt + AGEING * (clock - self.at), clock


class StepTimes:
    """T(tokens) in seconds: one point per half octave, straight lines between them.  T never falls."""

    def __init__(self) -> None:
        self.asking = False
        """Whether drafters are asked in the steps that are observed, and in those that are predicted."""
        self._points: dict[int, _Point] = {}
        self._asking, self._verifying = _Cost(), _Cost()
        self._speed, self._speed_doubt, self._clock = 0.0, NOISE, 0
        self._xs, self._ys, self._slopes = [0.0], [1e-3], [0.0]  # Before anything was measured.
        self._speed_factor, self._asking_factor, self._verifying_factor, self._stale = 1.0, 1.0, 1.0, False

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def observe(self, tokens: float, seconds: float, drafted: int = 0) -> None:
        """Takes the measured time of one step over `tokens` tokens, of which `drafted` are draft tokens."""
        if tokens < 1 or seconds <= 0:
            return
        self._clock += 1
        self._stale = True
        self._speed_doubt = min(self._speed_doubt + WANDER, 1.0)
        costs = [cost for cost, counts in ((self._asking, self.asking), (self._verifying, drafted > 0)) if counts]
        for cost in costs:
            cost.age(self._clock)
        cost_doubt = sum(cost.doubt for cost in costs)
        level = math.log(seconds) - self._speed - sum(cost.level for cost in costs)
        place = round(2 * math.log2(tokens))
        point = self._points.get(place)
        if point is None:
            self._points[place] = _Point(tokens, level, NOISE + self._speed_doubt + cost_doubt, self._clock)
            return
        point.doubt += AGEING * (self._clock - point.at)
        point.at = self._clock
        surprise, total = level - point.level, self._speed_doubt + point.doubt + cost_doubt + NOISE
        most = HICCUP * math.sqrt(total)
        if surprise < -most and point.doubt > UNFITTED:
            # Noise only makes steps slower: the unproven point was too high.
            point.level = level
            return
        surprise = max(-most, min(most, surprise))
        gain, speed_gain = point.doubt / total, self._speed_doubt / total
        point.tokens += gain * (tokens - point.tokens)
        point.level += gain * surprise
        point.doubt *= 1 - gain
        self._speed += speed_gain * surprise
        self._speed_doubt *= 1 - speed_gain
        for cost in costs:
            cost.level = max(cost.level + cost.doubt / total * surprise, 0.0)
            cost.doubt *= 1 - cost.doubt / total

    def doubt(self) -> None:
        """The next steps measure anew how fast the machine is, and what asking and verifying cost."""
        self._speed_doubt = max(self._speed_doubt, NOISE)
        for cost in (self._asking, self._verifying):
            cost.doubt = max(cost.doubt, COST)

    def at(self, base: float, drafted: float = 0.0, asking: bool | None = None, prefill: int = 0) -> float:
        """The predicted seconds of a step over `base` tokens and `drafted` draft tokens.

        `asking`: of one in which drafters are asked, or are not.  Less than one draft token on average: some steps have none.
        `prefill`: prompt tokens in the same step.  Draft tokens cost what they do on top of these, whose own time is left out:
        it is spent in any case, and all else would look cheap beside it.
        """
        if self._stale:
            self._draw()
        factor = self._factor(self.asking if asking is None else asking)
        verifying = 1 + min(drafted, 1.0) * (self._verifying_factor - 1)
        return factor * verifying * (self._level(base + prefill + drafted) - self._prompt(base, prefill))

    def _level(self, tokens: float) -> float:
        i = bisect_right(self._xs, tokens) - 1
        return self._ys[i] + self._slopes[i] * (tokens - self._xs[i])

    def _prompt(self, base: float, prefill: int) -> float:
        return self._level(base + prefill) - self._level(base) if prefill else 0.0

    def _factor(self, asking: bool) -> float:
        return self._speed_factor * (self._asking_factor if asking else 1.0)

    def row(self, base: int, count: int, prefill: int = 0) -> npt.NDArray[np.float64]:
        """The predictions of `at` for 0, 1, ... draft tokens: `count` of them."""
        if self._stale:
            self._draw()
        end = base + prefill + count
        xs, ys = [*self._xs, max(self._xs[-1], end) + 1.0], [*self._ys, self._level(max(self._xs[-1], end) + 1.0)]
        levels = np.interp(np.arange(base + prefill, end), xs, ys)
        factor = self._factor(self.asking) * self._verifying_factor
        found: npt.NDArray[np.float64] = factor * (levels - self._prompt(base, prefill))
        found[:1] = self.at(base)
        return found

    def _draw(self) -> None:
        """Computes the curve from the points: doubtful ones are drawn to a straight line through all, then none may fall.

        An unproven point above the line is put on it, else the budget would avoid such steps and never learn better.
        """
        self._stale, self._speed_factor = False, math.exp(self._speed)
        self._asking_factor = math.exp(self._asking.level)
        # While no draft is verified, this cost is not measured: with time it counts for less, so that drafts are tried again.
        age = AGEING * (self._clock - self._verifying.at)
        self._verifying_factor = math.exp(self._verifying.level * UNFITTED / (UNFITTED + age))
        points = sorted(self._points.values(), key=lambda point: point.tokens)
        xs, ys = [point.tokens for point in points], [math.exp(point.level) for point in points]
        doubts = [point.doubt + AGEING * (self._clock - point.at) for point in points]
        start, slope = _line(xs, ys, doubts)
        for i, doubt in enumerate(doubts):
            off = start + slope * xs[i] - ys[i]
            ys[i] += off if off < 0 and doubt > UNFITTED else off * doubt / (doubt + UNFITTED)
        ys = _rising(ys, [1 / (y * y * doubt) for y, doubt in zip(ys, doubts, strict=True)])
        # Outside the points the line's slope holds, but time grows at most in proportion to tokens.
        first, last = min(slope, ys[0] / xs[0]), min(slope, ys[-1] / xs[-1])
        self._xs, self._ys = [0.0, *xs], [max(ys[0] - first * xs[0], 0.0), *ys]
        inner = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
        self._slopes = [first, *inner, last]


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


def _line(xs: list[float], ys: list[float], doubts: list[float]) -> tuple[float, float]:
    """Intercept and slope of the straight line through the points, fitted by relative distance; neither is negative.

    Few points, or close ones, say little about the slope: it is drawn to that of a step of which `SHARE` grows with its tokens.
    """
    weights = [1 / (y * y * (doubt + UNFITTED)) for y, doubt in zip(ys, doubts, strict=True)]
    total = sum(weights)
    x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    usual = SHARE * y / x
    spread = sum(w * (at - x) ** 2 for w, at in zip(weights, xs, strict=True))
    together = sum(w * (at - x) * (there - y) for w, at, there in zip(weights, xs, ys, strict=True))
    slope = (together + 1 / usual) / (spread + 1 / (usual * usual))
    slope = max(0.0, min(slope, y / x))
    return y - slope * x, slope


def _rising(ys: list[float], weights: list[float]) -> list[float]:
    """The nearest values to `ys` that never fall (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for y, weight in zip(ys, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > y:
            before, other, more = pools.pop()
            y, weight, count = (weight * y + other * before) / (weight + other), weight + other, count + more
        pools.append((y, weight, count))
    return [y for y, _, count in pools for _ in range(count)]
