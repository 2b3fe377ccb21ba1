"""What members do per second and per round, from the cumulative counters they report.  Pure; `now` is passed in.

`VerifierRates` and `DrafterRates` keep the one `VerifierLoad` or `DrafterSpeed` of their member up to date.  Loads and times
are averages that forget with time (`smoothing_s`); acceptance forgets with drafts, so that a pause does not erase it.  The
first report of a process that has restarted only sets a new mark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from backend.coordinator.assignment import DrafterSpeed, VerifierLoad
from backend.fleet import LOOKUP, DraftCounters, DrafterStats, VerifierStats

REMEMBERED_DRAFTS = 200.0
"""Drafts after which an older acceptance counts for half."""
TREND = 10
"""A round's fixed and further time are told apart over so many times `smoothing_s`."""
PRIOR_SLOPE = 0.3
"""Share of a round's time that is taken to grow with its requests while all rounds are alike."""


@dataclass
class Average:
    """The mean over about the last `over_s` seconds; the first value counts at once."""

    over_s: float
    value: float | None = None

    def note(self, value: float, seconds: float) -> None:
        """What held during the last `seconds`."""
        if self.value is None:
            self.value = value
        else:
            self.value += (1 - math.exp(-seconds / self.over_s)) * (value - self.value)


@dataclass
class Line:
    """y = fixed + slope * x through decayed points, near `PRIOR_SLOPE` while x hardly varies."""

    over_s: float
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def note(self, x: float, y: float, weight: float, seconds: float) -> None:
        """A point, `seconds` after the one before."""
        keep = math.exp(-seconds / self.over_s)
        terms = (1.0, x, y, x * x, x * y)
        self._sums = [keep * old + weight * new for old, new in zip(self._sums, terms, strict=True)]

    def read(self) -> tuple[float, float] | None:
        """`(fixed, slope)`, neither negative; None before the first point."""
        count, *sums = self._sums
        if count <= 0:
            return None
        x, y, xx, xy = (each / count for each in sums)
        if x <= 0:
            return y, 0.0
        doubt = (0.25 * x) ** 2
        slope = (xy - x * y + doubt * PRIOR_SLOPE * y / x) / (max(xx - x * x, 0.0) + doubt)
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope


class DrafterRates:
    """One drafter's speed."""

    def __init__(self, drafter_id: str, smoothing_s: float) -> None:
        self.speed = DrafterSpeed(drafter_id)
        self._round = Line(TREND * smoothing_s)
        self._last: tuple[DrafterStats, float] | None = None

    def observe(self, stats: DrafterStats, now: float) -> None:
        """Takes a report."""
        last, self._last = self._last, (stats, now)
        if last is None or last[0].started_at != stats.started_at:
            return
        batches, drafts = stats.batches - last[0].batches, stats.drafts - last[0].drafts
        spent_s = stats.draft_s - last[0].draft_s
        if batches > 0 and drafts > 0 and spent_s > 0:
            self._round.note(drafts / batches, spent_s / batches, batches, now - last[1])
            line = self._round.read()
            if line is not None:
                self.speed.fixed_s, self.speed.per_request_s = line

    def set_down(self, verifier_id: str, is_down: bool) -> None:
        """What a verifier's circuit breaker says of it."""
        if (verifier_id in self.speed.down_for) != is_down:
            self.speed.down_for ^= {verifier_id}


class VerifierRates:
    """One verifier's load, times and acceptance."""

    def __init__(self, verifier_id: str, smoothing_s: float) -> None:
        self.load = VerifierLoad(verifier_id)
        self._requests = Average(smoothing_s)
        self._plain_s, self._drafted_s, self._bare_s = Average(smoothing_s), Average(smoothing_s), Average(smoothing_s)
        self._last: tuple[VerifierStats, float] | None = None

    def observe(self, stats: VerifierStats, now: float, drafters: dict[str, DrafterRates]) -> None:
        """Takes a report; `drafters` are the fleet's, to be told who does without them."""
        last, self._last = self._last, (stats, now)
        known = last is not None and last[0].started_at == stats.started_at
        seconds = now - last[1] if last is not None and known else 0.0
        load = self.load
        self._requests.note(float(stats.running or stats.waiting), seconds)
        load.requests = self._requests.value or 0.0
        if stats.running and stats.plain_step_s > 0:
            self._plain_s.note(stats.plain_step_s, seconds)
        if stats.running and stats.drafted_step_s > 0:
            self._drafted_s.note(stats.drafted_step_s, seconds)
        # In the other modes people have chosen that drafters draft.
        if stats.running and stats.lookup_step_s > 0 and stats.mode == "auto":
            # Look-ups that do not pay are not verified.
            self._bare_s.note(min(stats.lookup_step_s / stats.lookup_length, stats.plain_step_s), seconds)
        load.plain_s, load.drafted_s, load.bare_s = self._plain_s.value, self._drafted_s.value, self._bare_s.value
        load.may_skip = stats.mode == "auto"
        load.overlap = _overlap(stats)
        if last is not None and known:
            self._note_drafts(last[0], stats, drafters)

    def _note_drafts(self, old: VerifierStats, new: VerifierStats, drafters: dict[str, DrafterRates]) -> None:
        drafts = accepted = 0
        for drafter_id, counters in new.drafters.items():
            before = old.drafters.get(drafter_id, DraftCounters())
            # What a verifier drafts itself says nothing of drafters.
            if drafter_id != LOOKUP:
                drafts += counters.drafts - before.drafts
                accepted += counters.accepted_tokens - before.accepted_tokens
        if drafts:
            length = 1 + accepted / drafts
            step = drafts / (drafts + REMEMBERED_DRAFTS)
            self.load.length = length if self.load.length is None else self.load.length + step * (length - self.load.length)
        for drafter_id in {*old.drafters_down, *new.drafters_down}:
            if drafter_id in drafters:
                drafters[drafter_id].set_down(new.verifier_id, drafter_id in new.drafters_down)


def _overlap(stats: VerifierStats) -> float:
    """How much of drafting the present plan hides behind verification."""
    if stats.plan_outcomes:
        hits = sum(each.ahead_hits for each in stats.drafters.values())
        asked = hits + sum(each.ahead_misses for each in stats.drafters.values())
        return hits / asked if asked else 0.5
    return 0.0
