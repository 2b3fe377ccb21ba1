"""Level-two balancing: which running requests to move from the slowest verifier to the fastest.  Pure.

Events and `now` in, decisions out: no clock, socket or logger.  A gateway decides for its own requests
(`gateway/balancing.py`); a simulator can drive the same code.

All is counted in request-seconds, time that some client waits.  A request that moves gains what it and its old neighbours get
faster, loses what its new neighbours get slower, and costs the recomputation of its prompt and of what it has emitted: while
that runs, everybody at the new place waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.fleet import VerifierStats

UNKNOWN_SHARE = 0.5
"""Until steps of different sizes were seen: the share of a step's time that grows with its requests."""
MEMORY = 0.98
"""Weight that one sample of a step's time keeps when the next one comes."""


@dataclass(frozen=True)
class Load:
    """One verifier as balancing sees it."""

    id: str
    requests: int
    """Running and waiting."""
    step_fixed_s: float
    step_per_request_s: float
    """A step over n requests takes `step_fixed_s + n * step_per_request_s`."""
    tokens_per_step: float
    """Tokens that one request gains in one step: its acceptance length."""
    prefill_tokens_per_s: float
    slots: int
    """Requests in one step at most; more take turns."""
    free_tokens: int
    """Room in its KV cache."""
    takes_requests: bool = True

    def seconds_per_token(self, requests: int) -> float:
        """How long each of `requests` requests waits for a token."""
        in_step = min(requests, self.slots)
        step_s = self.step_fixed_s + in_step * self.step_per_request_s
        return step_s * max(1.0, requests / self.slots) / self.tokens_per_step

    def seconds(self, requests: int) -> float:
        """Request-seconds until each of `requests` requests has one more token."""
        return requests * self.seconds_per_token(requests)


@dataclass(frozen=True)
class Movable:
    """A request that may be moved."""

    id: str
    verifier_id: str
    tokens: int
    """Prompt and emitted tokens: what another verifier would have to compute again."""
    remaining: float
    """Tokens it is expected to emit yet."""
    placed_at: float
    """When it came to its verifier, on the clock of `now`."""


@dataclass(frozen=True)
class Limits:
    """What keeps balancing calm."""

    moves: int = 4
    """Requests moved in one decision at most."""
    dwell_s: float = 10.0
    """A request stays at least so long where it is."""
    gap: float = 1.25
    """A verifier must be slower than the other by this factor."""
    gain: float = 2.0
    """A move must promise its cost so many times over."""


@dataclass(frozen=True)
class Move:
    """One request to move, with the prediction that decided it, in request-seconds."""

    request_id: str
    source: str
    target: str
    gain_s: float
    cost_s: float


def plan_moves(loads: Sequence[Load], movables: Sequence[Movable], limits: Limits, now: float) -> list[Move]:
    """The moves worth making now, all between the pair with the largest gap; empty when there is none.

    `loads` are as measured, requests of other gateways included.  The order of the arguments does not matter.
    """
    at_rest = sorted(
        (each for each in movables if now - each.placed_at >= limits.dwell_s and each.remaining > 0), key=lambda each: each.id
    )
    pair = _widest_gap(loads, {each.verifier_id for each in at_rest})
    if pair is None:
        return []
    slow, fast = pair
    candidates = [each for each in at_rest if each.verifier_id == slow.id]
    n, m, room = slow.requests, fast.requests, fast.free_tokens
    moves: list[Move] = []
    while candidates and len(moves) < limits.moves and _still_apart(slow, n, fast, m, limits.gap):
        per_token = slow.seconds(n) - slow.seconds(n - 1) - (fast.seconds(m + 1) - fast.seconds(m))
        priced = [(_price(each, per_token, m, fast), each) for each in candidates if each.tokens + each.remaining <= room]
        worth = [(gain - cost, gain, cost, each) for (gain, cost), each in priced if gain > limits.gain * cost]
        if not worth:
            break
        _, gain, cost, best = max(worth, key=lambda each: (each[0], each[3].id))
        moves.append(Move(best.id, slow.id, fast.id, gain, cost))
        candidates.remove(best)
        n, m, room = n - 1, m + 1, room - int(best.tokens + best.remaining)
    return moves


def _widest_gap(loads: Sequence[Load], sources: set[str]) -> tuple[Load, Load] | None:
    """The slowest verifier that has something to give, and the one that would be fastest with one request more."""
    slow = max(
        (each for each in loads if each.id in sources and each.requests > 0),
        key=lambda each: (each.seconds_per_token(each.requests), each.id),
        default=None,
    )
    if slow is None:
        return None
    fast = min(
        (each for each in loads if each.id != slow.id and each.takes_requests),
        key=lambda each: (each.seconds_per_token(each.requests + 1), each.id),
        default=None,
    )
    return (slow, fast) if fast is not None else None


def _still_apart(slow: Load, n: int, fast: Load, m: int, gap: float) -> bool:
    """Whether one more move leaves the slow one slower: a gap that is turned round would be moved back."""
    if n < 1:
        return False
    after = fast.seconds_per_token(m + 1)
    return slow.seconds_per_token(n) > gap * after and (n == 1 or slow.seconds_per_token(n - 1) >= after)


def _price(request: Movable, per_token: float, neighbours: int, fast: Load) -> tuple[float, float]:
    cost = request.tokens / fast.prefill_tokens_per_s * (neighbours + 1)
    return request.remaining * per_token, cost


def expected_remaining(emitted: int, max_tokens: int, typical: float) -> float:
    """Tokens a request is likely to emit yet: as many again as it has, or as usual here, within its own limit."""
    return max(0.0, min(max_tokens - emitted, max(float(emitted), typical)))


@dataclass
class Speed:
    """How fast one verifier is, learned from its successive counters.

    Steps without prefill give the line through (requests, seconds), by least squares with fading memory; steps with prefill
    give the speed of recomputation.
    """

    prefill_tokens_per_s: float | None = None
    tokens_per_step: float = 1.0
    _last: VerifierStats | None = None
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def observe(self, stats: VerifierStats) -> None:
        """Takes in counters; those of an incarnation not seen before count from its start."""
        last, self._last = self._last, stats
        if last is None or last.started_at != stats.started_at:
            last = VerifierStats(stats.verifier_id, stats.started_at, stats.mode, stats.num_speculative_tokens)
        prefill_s, prefill_tokens = stats.prefill_s - last.prefill_s, stats.prefill_tokens - last.prefill_tokens
        if prefill_s > 0 and prefill_tokens > 0:
            measured, known = prefill_tokens / prefill_s, self.prefill_tokens_per_s
            self.prefill_tokens_per_s = measured if known is None else 0.8 * known + 0.2 * measured
        steps, requests = stats.decode_steps - last.decode_steps, stats.decode_requests - last.decode_requests
        verifications = stats.verifications - last.verifications
        if steps <= 0 or requests <= 0 or verifications <= 0:
            return
        # Waiting for drafts is part of what a token takes.
        waited_s = stats.idle_s.get("awaiting_draft", 0.0) - last.idle_s.get("awaiting_draft", 0.0)
        self.tokens_per_step = max(1.0, (stats.tokens - last.tokens) / verifications)
        x, y = requests / steps, (stats.decode_s - last.decode_s + waited_s) / steps
        for i, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[i] = MEMORY * self._sums[i] + value

    def step_cost(self) -> tuple[float, float] | None:
        """(fixed, per request) seconds of a step; None before the first one."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return None
        mean_x, mean_y = x / weight, y / weight
        spread = xx / weight - mean_x * mean_x
        if spread < 0.25:
            slope = UNKNOWN_SHARE * mean_y / mean_x
        else:
            slope = min(max((xy / weight - mean_x * mean_y) / spread, 0.0), mean_y / mean_x)
        return max(mean_y - slope * mean_x, 0.0), slope
