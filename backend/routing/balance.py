"""Balancing: decides which running requests to move from the slowest verifier to the fastest.  Pure.

Events and `now` in, decisions out: no clock, socket or logger.  A gateway decides for its own requests
(`gateway/fleet/balancing.py`).

Gains and costs are in request-seconds: seconds times the requests that wait.  A move gains the time that the request and its
old neighbours save, less the time that its new neighbours lose.  It costs the recomputation of the request's prompt and emitted
tokens, for which all requests at the new verifier wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from backend.fleet.speed import Speed

MOVES = 4
"""Most requests moved in one decision."""
DWELL_S = 10.0
"""Seconds that a request stays at a verifier at least."""
GAP = 1.25
"""The slow verifier must take this many times as long per token as the fast one."""
GAIN = 2.0
"""A move must gain more than this many times its cost."""


@dataclass(frozen=True)
class BalancingLoad:
    """One verifier as balancing sees it."""

    id: str
    requests: int
    """Requests running and waiting."""
    speed: Speed
    prefill_tokens_per_s: float
    slots: int
    """Most requests in one step; more than that take turns."""
    free_tokens: int
    """Room in its KV cache."""
    takes_requests: bool = True

    def seconds_per_token(self, requests: int) -> float:
        """Seconds that each of `requests` requests waits for a token."""
        in_step = min(requests, self.slots)
        return self.speed.step_s(in_step) * max(1.0, requests / self.slots) / self.speed.tokens

    def seconds(self, requests: int) -> float:
        """Request-seconds until each of `requests` requests has one more token."""
        return requests * self.seconds_per_token(requests)


@dataclass(frozen=True)
class Movable:
    """A request that may be moved."""

    id: str
    verifier_id: str
    tokens: int
    """Prompt and emitted tokens, which another verifier would have to compute again."""
    remaining: float
    """Tokens it is still expected to emit."""
    placed_at: float
    """When it came to its verifier, on the clock of `now`."""


@dataclass(frozen=True)
class Move:
    """One request to move, with its predicted gain and cost in request-seconds."""

    request_id: str
    source: str
    target: str
    gain_s: float
    cost_s: float


def plan_moves(loads: Sequence[BalancingLoad], movables: Sequence[Movable], now: float) -> list[Move]:
    """The moves that pay now, all from the slowest verifier to the fastest; empty if there are none.

    `loads` include requests of other gateways.  The order within the arguments does not matter.
    """
    at_rest = sorted(
        (each for each in movables if now - each.placed_at >= DWELL_S and each.remaining > 0), key=lambda each: each.id
    )
    pair = _widest_gap(loads, {each.verifier_id for each in at_rest})
    if pair is None:
        return []
    slow, fast = pair
    candidates = [each for each in at_rest if each.verifier_id == slow.id]
    n, m, room = slow.requests, fast.requests, fast.free_tokens
    moves: list[Move] = []
    while candidates and len(moves) < MOVES and _still_apart(slow, n, fast, m):
        per_token = slow.seconds(n) - slow.seconds(n - 1) - (fast.seconds(m + 1) - fast.seconds(m))
        fitting = (each for each in candidates if each.tokens + each.remaining <= room)
        waiting_s = (m + 1) / fast.prefill_tokens_per_s
        priced = ((each.remaining * per_token, each.tokens * waiting_s, each) for each in fitting)
        worth = [(gain - cost, gain, cost, each) for gain, cost, each in priced if gain > GAIN * cost]
        if not worth:
            break
        _, gain, cost, best = max(worth, key=lambda each: (each[0], each[3].id))
        moves.append(Move(best.id, slow.id, fast.id, gain, cost))
        candidates.remove(best)
        n, m, room = n - 1, m + 1, room - int(best.tokens + best.remaining)
    return moves


def _widest_gap(loads: Sequence[BalancingLoad], sources: set[str]) -> tuple[BalancingLoad, BalancingLoad] | None:
    """The slowest verifier with a movable request, and the verifier that would be fastest with one request more."""
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


def _still_apart(slow: BalancingLoad, n: int, fast: BalancingLoad, m: int) -> bool:
    """Whether one more move leaves the slow verifier slower.  Otherwise the next decision would move requests back."""
    if n < 1:
        return False
    after = fast.seconds_per_token(m + 1)
    return slow.seconds_per_token(n) > GAP * after and (n == 1 or slow.seconds_per_token(n - 1) >= after)


def expected_remaining(emitted: int, max_tokens: int, typical: float) -> float:
    """Tokens a request is still expected to emit: as many as it has emitted, or `typical` if that is more, within its limit."""
    return max(0.0, min(max_tokens - emitted, max(float(emitted), typical)))
