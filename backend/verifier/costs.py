"""What steps, drafts and acceptance cost and bring, learned from what was measured.  Pure; scheduler's process and thread.

Acceptance probabilities per draft position, the time a verification takes under each plan (`cycles.py`), and, for plans that
were never in force, two curves of measured points (steps, drafts) to estimate it from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from backend.verifier.cycles import Cycles, Plan, place_of

FORGET = 0.998
"""Weight of a verification after one newer one: about the last five hundred count."""
FADED = 0.2
"""Weight of all verifications once nothing was drafted for long."""
PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 8.0
"""What a new drafter is believed to have achieved: a few bad verifications at the start must not end drafting."""
EXPECTED_WEIGHT = 16.0
"""Verifications that what is expected counts for beside those seen at a load."""
NEWEST = 0.1
"""Share of the newest measurement in a point of a curve."""


@dataclass
class Curve:
    """y over x as measured, one point per half octave of x, straight lines between them.

    A point keeps what was last measured there, however long the load has been elsewhere since: a line fitted to recent
    measurements alone knows nothing of small batches after an hour of large ones.
    """

    points: dict[int, tuple[float, float]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def observe(self, x: float, y: float) -> None:
        """One measurement, x >= 1."""
        place = round(2 * math.log2(x))
        self.seen[place] = self.seen.get(place, 0) + 1
        weight = max(1 / self.seen[place], NEWEST)
        old_x, old_y = self.points.get(place, (x, y))
        self.points[place] = (old_x + weight * (x - old_x), old_y + weight * (y - old_y))

    def at(self, x: float) -> float | None:
        """The prediction; None before the first measurement.  It never falls with x."""
        known = sorted(self.points.values())
        if not known:
            return None
        right = next((i for i, (at, _) in enumerate(known) if at >= x), len(known))
        if right == 0 or len(known) == 1:
            return known[0][1]
        (x0, y0), (x1, y1) = known[min(right, len(known) - 1) - 1], known[min(right, len(known) - 1)]
        there = y0 + max((y1 - y0) / (x1 - x0), 0.0) * (x - x0)
        # Two near points and some noise make any slope; beyond the last of them more takes more in proportion at most.
        return min(there, y1 * x / x1) if x > x1 else there


@dataclass
class Acceptance:
    """P(position i accepted | all before it were), decayed."""

    drafted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """One drafted verification: the first `accepted` of `drafted` tokens were kept."""
        for by_position, prior in ((self.drafted, PRIOR_WEIGHT), (self.accepted, PRIOR_WEIGHT * PRIOR_CHANCE)):
            by_position.extend([prior] * (drafted - len(by_position)))
        for i in range(min(accepted + 1, drafted)):
            self.drafted[i] = FORGET * self.drafted[i] + 1
            self.accepted[i] = FORGET * self.accepted[i] + (i < accepted)

    def fade(self, weight: float) -> None:
        """What was seen long ago keeps its chances and this share of its weight."""
        self.drafted = [weight * n for n in self.drafted]
        self.accepted = [weight * n for n in self.accepted]

    def length(self, k: int) -> float:
        """Expected tokens per verification with `k` draft tokens: 1 + the sum of the products of the first i chances.

        Positions never seen are taken to be as good as the last one seen.
        """
        expected, chance, last = 1.0, 1.0, PRIOR_CHANCE
        for i in range(k):
            if i < len(self.drafted) and self.drafted[i] > 0:
                last = self.accepted[i] / self.drafted[i]
            chance *= last
            expected += chance
        return expected


@dataclass
class ByLoad:
    """The mean over verifications of something that differs with the load, decayed."""

    measured: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Sum and verifications."""

    def observe(self, requests: float, value: float) -> None:
        """One verification."""
        total, seen = self.measured.get(place_of(requests), (0.0, 0.0))
        self.measured[place_of(requests)] = FORGET * total + value, FORGET * seen + 1

    def at(self, requests: float, expected: float) -> float:
        """Where nothing was seen, `expected`."""
        total, seen = self.measured.get(place_of(requests), (0.0, 0.0))
        return (total + EXPECTED_WEIGHT * expected) / (seen + EXPECTED_WEIGHT)


Source = Literal["features", "ahead", "own"]
"""What a draft was made from: the target's features, an outcome enumerated before it came, the request's own text."""


@dataclass
class Learned:
    """What was learned of one kind of requests: what was accepted, and what plans took."""

    drafts: Acceptance = field(default_factory=Acceptance)
    """Of all drafts that were verified, whatever the plan: what drafting from the target's features would bring everywhere.
    Hits are easier than the average and drafts after a miss harder; together they are nearly all there is."""
    ahead: Acceptance = field(default_factory=Acceptance)
    """Of all verifications while outcomes are enumerated ahead, those that went without a draft included."""
    after_miss: Acceptance = field(default_factory=Acceptance)
    """Of drafts made afresh because what happened had not been enumerated: surprises go on surprising."""
    lookups: ByLoad = field(default_factory=ByLoad)
    """Tokens while prompt lookup alone drafts: it drafts less where steps are dear."""
    covered: dict[int, ByLoad] = field(default_factory=dict)
    """Whether there was a draft, by micro-batches: none came in time, or a request's own text was preferred and silent.  Steps
    without are cheap, and must not be taken for quick verifications of full drafts."""
    cycles: Cycles = field(default_factory=Cycles)

    def observe(self, plan: Plan, requests: float, source: Source, drafted: int, accepted: int) -> None:
        """See `Costs.note_verification`."""
        if plan.lookup:
            self.lookups.observe(requests, accepted + 1)
        elif plan.outcomes:
            self.ahead.observe(drafted or plan.k, accepted)
            if drafted and source == "features":
                self.after_miss.observe(drafted, accepted)
        else:
            self.covered.setdefault(plan.groups, ByLoad()).observe(requests, bool(drafted))
        if drafted and source != "own":
            self.drafts.observe(drafted, accepted)

    def length(self, plan: Plan, requests: float) -> float:
        """Expected tokens per verification, those without a draft included."""
        if plan.outcomes and self.ahead.drafted:
            return self.ahead.length(plan.k)
        covered = 1.0 if plan.outcomes or plan.groups not in self.covered else self.covered[plan.groups].at(requests, 1.0)
        return 1 + covered * (self.drafts.length(plan.k) - 1)

    def fade(self) -> None:
        """See `Costs.fade`."""
        for acceptance in (self.drafts, self.ahead, self.after_miss):
            acceptance.fade(FADED)
        self.cycles.fade()


@dataclass
class Costs:
    """The model `planner.py` decides with.  Times in seconds."""

    verify: Curve = field(default_factory=Curve)
    """Step time over tokens in the step."""
    draft: Curve = field(default_factory=Curve)
    """Draft round trip divided by k + 1 (one pass takes in the new rows, k draft), over requests in the round."""
    greedy: Learned = field(default_factory=Learned)
    sampled: Learned = field(default_factory=Learned)
    """Apart from greedy ones: the same draft is accepted far more often where the target takes its likeliest token, and
    verifying it without sampling takes less time."""
    greedy_share: float = 1.0
    """Of the requests running now."""
    lookups: tuple[float, float] | None = None
    """Share of verifications that prompt lookup finds a draft for, and tokens per verification if it alone drafted; None: not
    known.  Of requests like those running now; what it brings where it was in force is known by itself."""
    ahead_hit_rate: float = 0.5
    """Share of verifications whose outcome had been enumerated."""
    _overhead_s: float = 0.0

    @property
    def mostly_greedy(self) -> bool:
        """The kind that most requests are of now."""
        return self.greedy_share >= 0.5

    @property
    def cycles(self) -> Cycles:
        """Of that kind."""
        return (self.greedy if self.mostly_greedy else self.sampled).cycles

    @property
    def _other_cycles(self) -> Cycles:
        return (self.sampled if self.mostly_greedy else self.greedy).cycles

    def note_drafts(self, requests: int, k: int, drafter_s: float, waited_s: float | None) -> None:
        """Drafts of `k` tokens for `requests` requests came; the drafter computed for `drafter_s`.

        `waited_s` is the time since they were asked for where the verifier did nothing but wait, else None (an answer may lie
        unread while others are verified): then the way there and back takes as long as it did last.
        """
        if waited_s is not None:
            self._overhead_s += NEWEST * (max(waited_s - drafter_s, 0.0) - self._overhead_s)
        self.draft.observe(requests, (drafter_s + self._overhead_s) / (k + 1))

    def note_verification(self, plan: Plan, requests: float, greedy: bool, source: Source, drafted: int, accepted: int) -> None:
        """One verification under `plan`, which drafts, with `requests` requests decoding; `drafted` 0: without a draft."""
        (self.greedy if greedy else self.sampled).observe(plan, requests, source, drafted, accepted)

    def fade(self) -> None:
        """Nothing was drafted for long: what is drafted next counts for more than what was drafted then."""
        self.greedy.fade()
        self.sampled.fade()

    def verify_s(self, requests: float, k: float) -> float:
        """A step over `requests` requests with `k` draft tokens each."""
        return self.verify.at(requests * (1 + k)) or 1e-3

    def draft_s(self, requests: float, k: int) -> float:
        """From the end of a step to the arrival of its drafts."""
        return (k + 1) * (self.draft.at(requests) or 1e-3)

    def length(self, plan: Plan, requests: float) -> float:
        """Expected tokens per verification, of the requests decoding now."""
        if plan.lookup:
            expected = self._lookups_used(plan.k, requests)[1]
            greedy, sampled = (kind.lookups.at(requests, expected) for kind in (self.greedy, self.sampled))
            return self.greedy_share * greedy + (1 - self.greedy_share) * sampled
        greedy, sampled = self.greedy.length(plan, requests), self.sampled.length(plan, requests)
        return self.greedy_share * greedy + (1 - self.greedy_share) * sampled

    def _lookups_used(self, k: int, requests: float) -> tuple[float, float]:
        """Share of requests that lookups would draft for and tokens per verification; none and 1 where they would not pay."""
        if self.lookups is None:
            return 0.0, 1.0
        share, length = self.lookups
        plain_s = self.verify_s(requests, 0)
        return self.lookups if length * plain_s > self.verify_s(requests, share * k) else (0.0, 1.0)

    def length_after_miss(self, k: int) -> float:
        """The same of a draft made afresh because the outcome had not been enumerated."""
        greedy, sampled = self.greedy.after_miss.length(k), self.sampled.after_miss.length(k)
        return self.greedy_share * greedy + (1 - self.greedy_share) * sampled

    def per_verification_s(self, plan: Plan, requests: int) -> float:
        """Seconds per verification: as measured, or what other requests or the curves say, corrected by what is near."""
        measured = self.cycles.at(plan, requests)
        if measured is not None:
            return measured
        cycles, others = self.cycles, self._other_cycles.at(plan, requests)
        nearest = cycles.nearest(plan, requests)
        if others is not None:
            same = self._other_cycles.at_place(*nearest) if nearest is not None else None
            here = cycles.at_place(*nearest) if nearest is not None else None
            return others * here / same if here is not None and same is not None else others
        if nearest is None:
            cycles = self._other_cycles
            nearest = cycles.nearest(plan, requests)
        estimate = self._estimate(plan, requests)
        seconds = cycles.at_place(*nearest) if nearest is not None else None
        if nearest is None or seconds is None:
            return estimate
        estimate *= seconds / self._estimate(nearest[0], 2 ** (nearest[1] / 2))
        if nearest[0].structure == plan.structure and nearest[1] == place_of(requests):
            # More draft tokens take more time, at most in proportion, whatever curves of long ago say.
            bound = seconds * (1 + plan.k) / (1 + nearest[0].k)
            estimate = min(max(estimate, min(seconds, bound)), max(seconds, bound))
        return estimate

    def _estimate(self, plan: Plan, requests: float) -> float:
        """With two groups one is verified while the other's drafts are made.  Ahead of time, a draft is waited for when its
        outcome was not among those enumerated."""
        k = plan.k
        if k == 0:
            return self.verify_s(requests, 0) / requests
        if plan.lookup:
            return self.verify_s(requests, self._lookups_used(k, requests)[0] * k) / requests
        if plan.groups == 2:
            half = requests / 2
            return 2 * max(self.verify_s(half, k), self.draft_s(half, k)) / requests
        draft_s = self.draft_s(requests, k) * (1 - self.ahead_hit_rate if plan.outcomes else 1.0)
        return (self.verify_s(requests, k) + draft_s) / requests
