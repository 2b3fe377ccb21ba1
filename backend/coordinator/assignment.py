"""What the assignment of drafters to verifiers depends on, from members' reports.  Pure; `now` is passed in.

A binding says that a drafter serves a verifier.  Both may have several: a verifier's requests are split evenly over its
drafters (`backend/speculation/pairing.py`), and a drafter takes the rounds of all its verifiers in turn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backend.fleet import LOOKUP, DraftCounters, VerifierStats
from backend.fleet.speed import Speed

SMOOTHING_S = 2.0
"""Time constant of the averages of loads and times."""
REMEMBERED_DRAFTS = 200.0
"""A report of 200 drafts weighs as much as all acceptance before it."""

Pair = tuple[str, str]
"""(verifier, drafter)."""


@dataclass
class VerifierLoad:
    """One process of a verifier as the rule sees it.  A time or length of 0 was not measured yet.

    Averages of loads and times decay with time.  Acceptance decays with the number of newer drafts, so that a pause does not
    erase it.
    """

    requests: float = 0.0
    """Requests in a step, or waiting if none runs; a short-term average."""
    plain_s: float = 0.0
    """Seconds of a step over the present requests without drafts."""
    drafted_s: float = 0.0
    """Seconds of a step over the present requests with drafts of the length that it has asked for lately."""
    length: float = 0.0
    """Acceptance length of such drafts."""
    overlap: float = 0.0
    """Share of drafting that happens while the verifier computes.  0: it drafts, then verifies; 1: both at once."""
    may_skip: bool = True
    """Whether it stops drafting if plain steps are faster (mode `auto`)."""
    bare_s: float = 0.0
    """Seconds per token of each request without a drafter: of plain steps, or of steps with look-ups if these are faster."""
    down: frozenset[str] = frozenset()
    """Drafters whose circuit breaker is open here: the verifier does not wait for them."""
    _last: tuple[VerifierStats, float] | None = field(default=None, compare=False, repr=False)

    def observe(self, stats: VerifierStats, now: float) -> None:
        """Takes a report.  Counters are cumulative, so the first report only gives the starting values."""
        last, self._last = self._last, (stats, now)
        seconds = now - last[1] if last is not None else math.inf
        self.requests = _smoothed(self.requests, stats.running or stats.waiting, seconds)
        if stats.running and stats.plain_step_s > 0:
            self.plain_s = _smoothed(self.plain_s or stats.plain_step_s, stats.plain_step_s, seconds)
        if stats.running and stats.drafted_step_s > 0:
            self.drafted_s = _smoothed(self.drafted_s or stats.drafted_step_s, stats.drafted_step_s, seconds)
        # In the other modes verifiers always draft, because the operator chose so.
        self.may_skip = stats.mode == "auto"
        if stats.running and stats.lookup_step_s > 0 and self.may_skip:
            # Never slower than plain steps: look-ups that do not pay are not verified.
            bare_s = min(stats.lookup_step_s / stats.lookup_length, stats.plain_step_s)
            self.bare_s = _smoothed(self.bare_s or bare_s, bare_s, seconds)
        self.overlap = _overlap(stats)
        self.down = frozenset(stats.drafters_down)
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
            known = self.length or length
            self.length = known + drafts / (drafts + REMEMBERED_DRAFTS) * (length - known)


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on.  `verifiers` and `drafters` are the fit ones, by id and in the order of ids."""

    now: float
    verifiers: Mapping[str, VerifierLoad]
    drafters: Mapping[str, Speed | None]
    """The measured speed of each drafter's rounds; None: not measured yet."""
    bindings: Mapping[Pair, float] = field(default_factory=dict)
    """Pair -> since when it is bound.  Its members need not be fit any more."""
    pins: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Drafter -> the only verifiers that it serves, as far as they are fit.  An empty list keeps it out of service."""


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
