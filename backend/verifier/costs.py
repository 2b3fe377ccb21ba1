"""What steps, drafts and acceptance cost and bring, learned from what was measured.  Pure; engine thread.

Two curves of measured points, and one acceptance probability per draft position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORGET = 0.99
"""Weight of a verification after one newer one: about the last hundred count."""
PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 8.0
"""What a new drafter is believed to have achieved: a few bad verifications at the start must not end drafting."""
NEWEST = 0.1
"""Share of the newest measurement in a point of a curve."""


@dataclass
class Curve:
    """y over x as measured, one point per half octave of x, straight lines between them.

    A point keeps what was last measured there, however long the load has been elsewhere since: a line fitted to recent
    measurements alone knows nothing of small batches after an hour of large ones.
    """

    points: dict[int, tuple[float, float]] = field(default_factory=dict)

    def observe(self, x: float, y: float) -> None:
        """One measurement, x >= 1."""
        place = round(2 * math.log2(x))
        old_x, old_y = self.points.get(place, (x, y))
        self.points[place] = (old_x + NEWEST * (x - old_x), old_y + NEWEST * (y - old_y))

    def at(self, x: float) -> float | None:
        """The prediction; None before the first measurement.  It never falls with x."""
        known = sorted(self.points.values())
        if not known:
            return None
        right = next((i for i, (at, _) in enumerate(known) if at >= x), len(known))
        if right == 0 or len(known) == 1:
            return known[0][1]
        (x0, y0), (x1, y1) = known[min(right, len(known) - 1) - 1], known[min(right, len(known) - 1)]
        return y0 + max((y1 - y0) / (x1 - x0), 0.0) * (x - x0)


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
class Costs:
    """The model `planner.py` decides with.  Times in seconds."""

    verify: Curve = field(default_factory=Curve)
    """Step time over tokens in the step."""
    draft_per_token: Curve = field(default_factory=Curve)
    """Draft round trip divided by k, over requests in the round."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts made from the target's features."""
    ahead_acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts made ahead of time."""
    ahead_hit_rate: float = 0.5
    """Share of verifications whose outcome had been enumerated."""
    _overhead_s: float = 0.0

    def note_drafts(self, requests: int, k: int, drafter_s: float, waited_s: float | None) -> None:
        """Drafts of `k` tokens for `requests` requests came; the drafter had them for `drafter_s`.

        `waited_s` is the time since they were asked for where the verifier did nothing but wait, else None (an answer may lie
        unread while others are verified): then the way there and back takes as long as it did last.
        """
        if waited_s is not None:
            self._overhead_s += NEWEST * (max(waited_s - drafter_s, 0.0) - self._overhead_s)
        self.draft_per_token.observe(requests, (drafter_s + self._overhead_s) / k)

    def verify_s(self, requests: float, k: int) -> float:
        """A step over `requests` requests with `k` draft tokens each."""
        return self.verify.at(requests * (1 + k)) or 1e-3

    def length(self, k: int, ahead: bool) -> float:
        """Expected tokens per verification; ahead of time, hits and misses by their shares."""
        fresh = self.acceptance.length(k)
        if not ahead or not self.ahead_acceptance.drafted:
            return fresh
        return self.ahead_hit_rate * self.ahead_acceptance.length(k) + (1 - self.ahead_hit_rate) * fresh

    def draft_s(self, requests: float, k: int) -> float:
        """From the end of a step to the arrival of its drafts."""
        return k * (self.draft_per_token.at(requests) or 1e-3)
