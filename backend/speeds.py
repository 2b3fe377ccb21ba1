"""How fast verifiers are, from the counters they report: what routing predicts with.  Pure; the gateway's event loop.

Two successive reports give the mean batch and the mean time of the steps between them.  A line through those points, older ones
weighing less, is the verifier's step time over its batch.  Waiting for drafts belongs to a step: the requests wait with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.fleet import VerifierStats
from backend.routing import Measured

MEMORY = 0.95
"""What a report still weighs when the next one is in: at four reports a second, half of it after 3.4 s of work."""
PRIOR_STEPS = 20.0
"""Weight, in steps, of the assumption that half of a step's time is the batch's; until batches of other sizes were seen."""
PRIOR_SHARE = 0.5
UNKNOWN_RESPONSE_TOKENS = 128.0
"""Assumed length of a response before the first one has finished."""


@dataclass
class _Line:
    """Weighted sums over (batch, seconds per step), and of what the steps brought."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    tokens: float = 0.0
    verifications: float = 0.0

    def add(self, steps: int, seconds: float, verifications: int, tokens: int) -> None:
        batch, step_s = verifications / steps, seconds / steps
        for name, value in (("weight", 1.0), ("x", batch), ("y", step_s), ("xx", batch * batch), ("xy", batch * step_s)):
            setattr(self, name, MEMORY * getattr(self, name) + steps * value)
        self.tokens = MEMORY * self.tokens + tokens
        self.verifications = MEMORY * self.verifications + verifications

    def fit(self) -> tuple[float, float]:
        """Seconds of a step, and seconds per sequence in it; neither negative."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        prior = PRIOR_SHARE * mean_y / mean_x
        spread = max(self.xx - self.weight * mean_x * mean_x, 0.0)
        common = self.xy - self.weight * mean_x * mean_y
        slope = (common + PRIOR_STEPS * prior) / (spread + PRIOR_STEPS)
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


class SpeedBook:
    """The verifiers of one fleet, by id."""

    def __init__(self) -> None:
        self._last: dict[str, VerifierStats] = {}
        self._lines: dict[str, _Line] = {}
        self._measured: dict[str, Measured] = {}

    def observe(self, stats: VerifierStats, kv_tokens: float) -> None:
        """Takes in a report of a verifier whose KV cache holds `kv_tokens`; an incarnation's first is only a beginning."""
        last = self._last.get(stats.verifier_id)
        self._last[stats.verifier_id] = stats
        if last is None or last.started_at != stats.started_at:
            self._lines[stats.verifier_id] = _Line()
            self._measured.pop(stats.verifier_id, None)
            return
        line = self._lines[stats.verifier_id]
        steps = stats.steps - last.steps
        verifications = stats.verifications - last.verifications
        seconds = _step_seconds(stats) - _step_seconds(last)
        if steps > 0 and verifications > 0 and seconds > 0:
            line.add(steps, seconds, verifications, stats.tokens - last.tokens)
        if line.weight:
            self._measured[stats.verifier_id] = _measure(stats, line, kv_tokens)

    def forget(self, verifier_id: str) -> None:
        """It is gone."""
        for each in (self._last, self._lines, self._measured):
            each.pop(verifier_id, None)

    def measured(self, verifier_id: str) -> Measured | None:
        """What is known of a verifier; None before its first steps."""
        return self._measured.get(verifier_id)


def _measure(stats: VerifierStats, line: _Line, kv_tokens: float) -> Measured:
    step_s, sequence_s = line.fit()
    finished = sum(count for reason, count in stats.requests_finished.items() if reason in ("stop", "length"))
    return Measured(
        running=stats.running,
        waiting=stats.waiting,
        kv_free=(1 - stats.kv_usage) * kv_tokens,
        kv_held=stats.kv_usage * kv_tokens,
        tokens_per_verification=max(line.tokens / line.verifications, 1e-3),
        step_s=step_s,
        sequence_s=sequence_s,
        response_tokens=max(stats.tokens / finished, 1.0) if finished else UNKNOWN_RESPONSE_TOKENS,
    )


def _step_seconds(stats: VerifierStats) -> float:
    return stats.busy_s + stats.idle_s.get("awaiting_draft", 0.0) + stats.idle_s.get("transfer", 0.0)
