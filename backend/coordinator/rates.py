"""Computes a verifier's present load, times and acceptance from its reports.  Pure; `now` is passed in.

`VerifierRates` keeps the `VerifierLoad` of one process up to date.  Averages of loads and times decay with time
(`SMOOTHING_S`).  Acceptance decays with the number of newer drafts, so that a pause does not erase it.
"""

import math

from backend.coordinator.assignment import VerifierLoad
from backend.fleet import LOOKUP, DraftCounters, VerifierStats

SMOOTHING_S = 2.0
"""Time constant of the averages of loads and times."""
REMEMBERED_DRAFTS = 200.0
"""A report of 200 drafts weighs as much as all acceptance before it."""


class VerifierRates:
    """One verifier's load, times and acceptance."""

    def __init__(self) -> None:
        self.load = VerifierLoad()
        self._last: tuple[VerifierStats, float] | None = None

    def observe(self, stats: VerifierStats, now: float) -> None:
        """Takes a report.  Counters are cumulative, so the first report only gives the starting values."""
        last, self._last = self._last, (stats, now)
        seconds = now - last[1] if last is not None else math.inf
        load = self.load
        load.requests = _smoothed(load.requests, stats.running or stats.waiting, seconds)
        if stats.running and stats.plain_step_s > 0:
            load.plain_s = _smoothed(load.plain_s or stats.plain_step_s, stats.plain_step_s, seconds)
        if stats.running and stats.drafted_step_s > 0:
            load.drafted_s = _smoothed(load.drafted_s or stats.drafted_step_s, stats.drafted_step_s, seconds)
        # In the other modes verifiers always draft, because the operator chose so.
        load.may_skip = stats.mode == "auto"
        if stats.running and stats.lookup_step_s > 0 and load.may_skip:
            # Never slower than plain steps: look-ups that do not pay are not verified.
            bare_s = min(stats.lookup_step_s / stats.lookup_length, stats.plain_step_s)
            load.bare_s = _smoothed(load.bare_s or bare_s, bare_s, seconds)
        load.overlap = _overlap(stats)
        load.down = frozenset(stats.drafters_down)
        if last is not None:
            self._note_drafts(last[0], stats)

    def _note_drafts(self, old: VerifierStats, new: VerifierStats) -> None:
        drafts = accepted = 0
        for drafter_id, counters in new.drafters.items():
            before = old.drafters.get(drafter_id, DraftCounters())
            # Look-ups are the verifier's own drafts and say nothing about drafters.
            if drafter_id != LOOKUP:
                drafts += counters.drafts - before.drafts
                accepted += counters.accepted_tokens - before.accepted_tokens
        if drafts:
            length = 1 + accepted / drafts
            known = self.load.length or length
            self.load.length = known + drafts / (drafts + REMEMBERED_DRAFTS) * (length - known)


def _smoothed(old: float, new: float, seconds: float) -> float:
    """The mean over about the last `SMOOTHING_S` seconds, after `new` held during the last `seconds`."""
    return old + (1 - math.exp(-seconds / SMOOTHING_S)) * (new - old)


def _overlap(stats: VerifierStats) -> float:
    """Share of verifications whose outcome was drafted ahead."""
    if not stats.plan_outcomes:
        return 0.0
    hits = sum(each.ahead_hits for each in stats.drafters.values())
    lookups = hits + sum(each.ahead_misses for each in stats.drafters.values())
    return hits / lookups if lookups else 0.5
