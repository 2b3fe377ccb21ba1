"""What steps, drafts and acceptance cost and bring, learned from what was measured.  Pure; engine thread.

Two straight lines with exponential forgetting, and one acceptance probability per draft position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORGET = 0.99
"""Weight of an observation after one newer one: about the last hundred count."""


@dataclass
class Line:
    """Weighted least squares of y = a + b x with a, b >= 0."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, y: float) -> None:
        """One measurement."""
        self.weight = FORGET * self.weight + 1
        self.x = FORGET * self.x + x
        self.y = FORGET * self.y + y
        self.xx = FORGET * self.xx + x * x
        self.xy = FORGET * self.xy + x * y

    def at(self, x: float) -> float | None:
        """The prediction; None before the first measurement."""
        if not self.weight:
            return None
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        slope = 0.0
        if variance > 1e-6 * max(mean_x * mean_x, 1e-12):
            slope = max((self.xy / self.weight - mean_x * mean_y) / variance, 0.0)
        intercept = mean_y - slope * mean_x
        if intercept < 0:
            return mean_y / mean_x * x if mean_x else mean_y
        return intercept + slope * x


@dataclass
class Acceptance:
    """P(position i accepted | all before it were), decayed."""

    drafted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """One drafted verification: the first `accepted` of `drafted` tokens were kept."""
        for by_position in (self.drafted, self.accepted):
            by_position.extend([0.0] * (drafted - len(by_position)))
        for i in range(min(accepted + 1, drafted)):
            self.drafted[i] = FORGET * self.drafted[i] + 1
            self.accepted[i] = FORGET * self.accepted[i] + (i < accepted)

    def length(self, k: int) -> float:
        """Expected tokens per verification with `k` draft tokens: 1 + the sum of the products of the first i chances.

        Positions never seen are taken to be as good as the last one seen; with nothing seen at all, every second is accepted.
        """
        expected, chance, last = 1.0, 1.0, 0.5
        for i in range(k):
            if i < len(self.drafted) and self.drafted[i] > 0:
                last = self.accepted[i] / self.drafted[i]
            chance *= last
            expected += chance
        return expected


@dataclass
class Costs:
    """The model `planner.py` decides with.  Times in seconds."""

    verify: Line = field(default_factory=Line)
    """Step time over tokens in the step."""
    draft_per_token: Line = field(default_factory=Line)
    """Draft round trip divided by k, over requests in the round."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts made from the target's features."""
    ahead_acceptance: Acceptance = field(default_factory=Acceptance)
    """Of drafts made ahead of time."""
    ahead_hit_rate: float = 0.5
    """Share of verifications whose outcome had been enumerated."""
    _overhead_s: float = 0.0

    def note_drafts(self, requests: int, k: int, waited_s: float, draft_s: float, overlapped: bool) -> None:
        """Drafts of `k` tokens for `requests` requests came `waited_s` after they were asked for.

        When verification of others ran meanwhile, the answer lay unread for a while: then what counts is the drafter's own
        time and the overhead last seen without overlap.
        """
        if overlapped:
            waited_s = draft_s + self._overhead_s
        else:
            self._overhead_s += 0.1 * (max(waited_s - draft_s, 0.0) - self._overhead_s)
        self.draft_per_token.observe(requests, waited_s / k)

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
