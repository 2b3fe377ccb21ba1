"""Which drafts a verifier waits for, which it may use, and when it stops waiting.

Pure: events and `now` (seconds of any monotonic clock) in, decisions out; no socket, clock or logger.  Lives in the
scheduler's process and thread.

A draft is usable only while its request is exactly `base_len` tokens long.  Waiting is bounded by a deadline learned from the
round-trip time (RFC 6298's estimator), and a drafter that misses several rounds in a row is not waited for at all until it
answers again (a circuit breaker): losing a drafter costs speed, never a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.fleet import FALLBACK

BREAKER_MISSES = 3
"""Rounds in a row without any answer after which a drafter is no longer waited for."""

REMEMBERED = 8
"""Unanswered questions remembered per request: a drafter whose breaker is open answers for a length already left behind."""

FLOOR_S = 0.01
"""Shortest deadline: below this the operating system's own scheduling decides, not the drafter."""


@dataclass
class RoundTrip:
    """Smoothed round-trip time and its deviation (RFC 6298), in seconds."""

    smoothed_s: float | None = None
    deviation_s: float = 0.0

    def observe(self, sample_s: float) -> None:
        """Takes one measured round trip."""
        if self.smoothed_s is None:
            self.smoothed_s, self.deviation_s = sample_s, sample_s / 2
            return
        self.deviation_s += 0.25 * (abs(self.smoothed_s - sample_s) - self.deviation_s)
        self.smoothed_s += 0.125 * (sample_s - self.smoothed_s)

    def deadline_s(self, longest_s: float) -> float:
        """How long to wait for an answer; `longest_s` until the first one was measured."""
        if self.smoothed_s is None:
            return longest_s
        return min(longest_s, max(FLOOR_S, 2 * (self.smoothed_s + 4 * self.deviation_s)))


@dataclass
class DrafterHealth:
    """What is known of one drafter's answers."""

    round_trip: RoundTrip = field(default_factory=RoundTrip)
    misses: int = 0

    @property
    def is_down(self) -> bool:
        """Whether the circuit breaker is open."""
        return self.misses >= BREAKER_MISSES


@dataclass(frozen=True)
class Pending:
    """A draft that was asked for and has not come."""

    drafter_id: str
    base_len: int
    asked_at: float
    deadline: float


@dataclass(frozen=True)
class Usable:
    """A draft to verify in the next step."""

    request_id: str
    drafter_id: str
    base_len: int
    tokens: list[int]
    ahead: bool = False
    """Made ahead of time, from the drafter's own features where the target's were not known yet."""


@dataclass(frozen=True)
class Verdict:
    """What became of an arrived draft: `ready`, `late`, `stale` or `invalid` (it is then used as an empty one)."""

    kind: str
    waited_s: float | None = None


class DraftBook:
    """The bookkeeping of outstanding drafts for all requests of one verifier.

    Invariants (tested by a state machine): a request has at most one pending draft; a draft comes out of `collect` at most
    once, only for the base length it was asked for, and only if its tokens are valid ids.
    """

    def __init__(self, vocab_size: int, longest_wait_s: float) -> None:
        self.pending: dict[str, Pending] = {}
        self._ready: dict[str, Usable] = {}
        self._overdue: dict[str, dict[int, Pending]] = {}
        self._health: dict[str, DrafterHealth] = {}
        self.vocab_size = vocab_size
        self._longest_wait_s = longest_wait_s

    def set_drafters(self, drafter_ids: list[str]) -> list[str]:
        """Only these may be waited for from now on; returns the requests released from drafters that left."""
        for gone in self._health.keys() - set(drafter_ids):
            del self._health[gone]
        for new in drafter_ids:
            self._health.setdefault(new, DrafterHealth())
        released = [r for r, p in self.pending.items() if p.drafter_id not in self._health]
        for request_id in released:
            del self.pending[request_id]
        return released

    def reset_drafter(self, drafter_id: str) -> None:
        """The drafter was replaced by another incarnation: nothing asked of the old one will come."""
        self._health[drafter_id] = DrafterHealth()
        for request_id in [r for r, p in self.pending.items() if p.drafter_id == drafter_id]:
            del self.pending[request_id]

    def expect(self, request_id: str, base_len: int, drafter_id: str, now: float) -> bool:
        """A draft was asked for; True when it has to be waited for.

        False when the drafter is down or unknown; an answer that comes all the same closes the breaker.  Sockets are read by
        the thread that calls this, between steps, so no answer can come before its question is noted.
        """
        health = self._health.get(drafter_id)
        if health is None:
            return False
        self._ready.pop(request_id, None)
        asked = Pending(drafter_id, base_len, now, now + health.round_trip.deadline_s(self._longest_wait_s))
        if health.is_down:
            self._note_overdue(request_id, asked)
            return False
        self.pending[request_id] = asked
        return True

    def give(self, draft: Usable) -> None:
        """A draft that was made before it was needed, or on the spot."""
        if draft.drafter_id in self._health or draft.drafter_id == FALLBACK:
            self._ready[draft.request_id] = draft

    def stop_waiting(self) -> None:
        """Requests whose drafts are out go on without them; what comes late is dropped."""
        for request_id, pending in self.pending.items():
            self._note_overdue(request_id, pending)
        self.pending.clear()

    def arrived(self, drafter_id: str, request_id: str, base_len: int, tokens: list[int], limit: int, now: float) -> Verdict:
        """A draft came in; at most `limit` tokens of it are kept."""
        if drafter_id not in self._health:
            return Verdict("stale")
        valid = all(0 <= token < self.vocab_size for token in tokens)
        pending = self.pending.get(request_id)
        if pending is not None and (pending.drafter_id, pending.base_len) == (drafter_id, base_len):
            del self.pending[request_id]
            waited = now - pending.asked_at
            self._answered(drafter_id, waited)
            self._ready[request_id] = Usable(request_id, drafter_id, base_len, tokens[:limit] if valid else [])
            return Verdict("ready" if valid else "invalid", waited)
        overdue = self._overdue.get(request_id, {}).get(base_len)
        if overdue is not None and overdue.drafter_id == drafter_id:
            # The request may have gone on meanwhile: the answer is of no use, but its time says whether to wait again.
            del self._overdue[request_id][base_len]
            waited = now - overdue.asked_at
            self._answered(drafter_id, waited)
            return Verdict("late", waited)
        return Verdict("stale")

    def collect(self, now: float) -> tuple[list[Usable], list[str]]:
        """Drafts that came since the last call, and the requests whose wait has run out (they decode plainly)."""
        ready = list(self._ready.values())
        self._ready.clear()
        expired = [request_id for request_id, p in self.pending.items() if now >= p.deadline]
        late_drafters: set[str] = set()
        for request_id in expired:
            pending = self.pending.pop(request_id)
            self._note_overdue(request_id, pending)
            late_drafters.add(pending.drafter_id)
        for drafter_id in late_drafters:
            health = self._health.get(drafter_id)
            if health is not None:
                health.misses += 1
                if health.is_down:
                    self._release_all(drafter_id, expired)
        return ready, expired

    def next_deadline(self, request_ids: Iterable[str] | None = None) -> float | None:
        """When the first wait (of these requests, or of all) runs out; None when nothing is waited for."""
        mine = self.pending if request_ids is None else [r for r in request_ids if r in self.pending]
        return min((self.pending[r].deadline for r in mine), default=None)

    def deadline_beside_prefill(self, request_ids: Iterable[str], draft_s: float, saved_s: float) -> float | None:
        """The same where there is prefill to do, which need not wait: how long it should, or None.

        Drafts verified beside a prompt need no step of their own, which saves `saved_s`.  So a step waits that long for them at
        most, and not at all where drafts take longer (`draft_s`).
        """
        mine = [self.pending[r] for r in request_ids if r in self.pending]
        if not mine or draft_s >= saved_s:
            return None
        return min(min(p.deadline for p in mine), max(p.asked_at for p in mine) + saved_s)

    def has_ready(self) -> bool:
        """Whether `collect` would return a draft."""
        return bool(self._ready)

    def forget(self, request_id: str) -> None:
        """The request is finished, aborted or preempted."""
        for book in (self.pending, self._ready, self._overdue):
            book.pop(request_id, None)

    def down(self) -> list[str]:
        """Drafters whose breaker is open."""
        return sorted(d for d, h in self._health.items() if h.is_down)

    def _answered(self, drafter_id: str, waited_s: float) -> None:
        health = self._health[drafter_id]
        if waited_s <= self._longest_wait_s:
            health.misses = 0
        health.round_trip.observe(waited_s)

    def _note_overdue(self, request_id: str, pending: Pending) -> None:
        asked = self._overdue.setdefault(request_id, {})
        asked[pending.base_len] = pending
        while len(asked) > REMEMBERED:
            del asked[next(iter(asked))]

    def _release_all(self, drafter_id: str, expired: list[str]) -> None:
        for request_id in [r for r, p in self.pending.items() if p.drafter_id == drafter_id]:
            self._note_overdue(request_id, self.pending.pop(request_id))
            expired.append(request_id)
