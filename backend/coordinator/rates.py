"""Computes a verifier's present load, times and acceptance from its reports.  Pure; `now` is passed in.

`VerifierRates` keeps the `VerifierLoad` of its member up to date.  Averages of loads and times decay with time (`SMOOTHING_S`).
Acceptance decays with the number of newer drafts, so that a pause does not erase it.  Counters are cumulative: after a restart
the first report only gives the new starting values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from backend.coordinator.assignment import DrafterSpeed, VerifierLoad
from backend.fleet import LOOKUP, DraftCounters, VerifierStats

SMOOTHING_S = 2.0
"""Time constant of the averages of loads and times."""
REMEMBERED_DRAFTS = 200.0
"""A report of 200 drafts weighs as much as all acceptance before it."""


@dataclass
class Average:
    """The mean over about the last `over_s` seconds; the first value counts at once."""

    over_s: float = SMOOTHING_S
    value: float | None = None

    def note(self, value: float, seconds: float) -> None:
        """Takes the value that held during the last `seconds`."""
        if self.value is None:
            self.value = value
        else:
            self.value += (1 - math.exp(-seconds / self.over_s)) * (value - self.value)


class VerifierRates:
    """One verifier's load, times and acceptance."""

    def __init__(self, verifier_id: str) -> None:
        self.load = VerifierLoad(verifier_id)
        self._requests = Average()
        self._plain_s, self._drafted_s, self._bare_s = Average(), Average(), Average()
        self._last: tuple[VerifierStats, float] | None = None

    def observe(self, stats: VerifierStats, now: float, drafters: Mapping[str, DrafterSpeed]) -> None:
        """Takes a report.  Notes in `drafters`, the fleet's, which circuit breakers this verifier has opened or closed."""
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
        # In the other modes verifiers always draft, because the operator chose so.
        if stats.running and stats.lookup_step_s > 0 and stats.mode == "auto":
            # Never slower than plain steps: look-ups that do not pay are not verified.
            self._bare_s.note(min(stats.lookup_step_s / stats.lookup_length, stats.plain_step_s), seconds)
        load.plain_s, load.drafted_s, load.bare_s = self._plain_s.value, self._drafted_s.value, self._bare_s.value
        load.may_skip = stats.mode == "auto"
        load.overlap = _overlap(stats)
        if last is not None and known:
            self._note_drafts(last[0], stats, drafters)

    def _note_drafts(self, old: VerifierStats, new: VerifierStats, drafters: Mapping[str, DrafterSpeed]) -> None:
        drafts = accepted = 0
        for drafter_id, counters in new.drafters.items():
            before = old.drafters.get(drafter_id, DraftCounters())
            # Look-ups are the verifier's own drafts and say nothing about drafters.
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
    """Share of verifications whose outcome was drafted ahead."""
    if stats.plan_outcomes:
        hits = sum(each.ahead_hits for each in stats.drafters.values())
        asked = hits + sum(each.ahead_misses for each in stats.drafters.values())
        return hits / asked if asked else 0.5
    return 0.0
