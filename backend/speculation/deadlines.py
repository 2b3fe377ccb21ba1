"""Decides how long to wait for drafts, and for which drafters.  Pure; scheduler's process and thread.

Waiting is bounded by a deadline learned from round trips (RFC 6298's estimator).  A drafter that misses several deadlines in a
row is not waited for at all until it answers again (a circuit breaker): losing a drafter costs speed, never a request.  Steps
may go on without a draft long before its deadline.  The deadline still counts as missed if the drafter stays silent until then.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.speculation.candidate import Question, Request

BREAKER_MISSES = 3
"""Deadlines missed in a row that open a drafter's circuit breaker."""
REMEMBERED = 8
"""Overdue questions remembered per request.  A late answer closes the breaker only if its question is remembered."""
FLOOR_S = 0.01
"""Shortest deadline: below this the operating system's own scheduling decides, not the drafter."""


@dataclass
class RoundTrip:
    """Smoothed round-trip time and its deviation (RFC 6298), in seconds."""

    smoothed_s: float | None = None
    deviation_s: float = 0.0

    def observe(self, sample_s: float) -> None:
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
    silent_since: float | None = None
    """When it was first asked since its latest answer or missed deadline; None: it has not been asked since."""

    @property
    def is_down(self) -> bool:
        """Whether the circuit breaker is open."""
        return self.misses >= BREAKER_MISSES


class Questions:
    """The drafts that were asked for.  At most one per request is waited for."""

    def __init__(self, longest_wait_s: float) -> None:
        self.pending: dict[Request, Question] = {}
        self._health: dict[str, DrafterHealth] = {}
        self.longest_wait_s = longest_wait_s

    def set_drafters(self, drafter_ids: Iterable[str]) -> None:
        """Waits for these drafters alone from now on."""
        self._health = {drafter_id: self._health.get(drafter_id, DrafterHealth()) for drafter_id in drafter_ids}
        self.pending = {r: p for r, p in self.pending.items() if p.drafter_id in self._health}

    def reset_drafter(self, drafter_id: str) -> None:
        """The drafter was restarted: what its earlier incarnation was asked for will not come."""
        self._health[drafter_id] = DrafterHealth()
        self.pending = {r: p for r, p in self.pending.items() if p.drafter_id != drafter_id}

    def expects(self, drafter_ids: Iterable[str], now: float) -> None:
        """Notes that these drafters were asked for something: until they answer, they count as silent."""
        for drafter_id in drafter_ids:
            health = self._health[drafter_id]
            if health.silent_since is None:
                health.silent_since = now

    def heard(self, drafter_id: str) -> None:
        """Notes that it has answered something."""
        if (health := self._health.get(drafter_id)) is not None:
            health.misses, health.silent_since = 0, None

    def asked(self, request: Request, base_len: int, drafter_id: str, now: float, *, awaited: bool = True) -> None:
        """Notes that a draft was asked for.  If it is `awaited`, steps wait unless the drafter's circuit breaker is open."""
        self.expects((drafter_id,), now)
        health = self._health[drafter_id]
        question = Question(drafter_id, base_len, now, now + health.round_trip.deadline_s(self.longest_wait_s))
        if health.is_down or not awaited:
            _note_overdue(request, question)
        else:
            self.pending[request] = question

    def answered(self, drafter_id: str, request: Request, base_len: int, now: float) -> float | None:
        """Takes an answer, which may close the breaker.  Returns seconds since its question; None if there was no question."""
        question = self.pending.get(request)
        if question is not None and question.base_len == base_len and question.drafter_id == drafter_id:
            del self.pending[request]
        else:
            question = request.overdue.get(base_len)
            if question is None or question.drafter_id != drafter_id or drafter_id not in self._health:
                return None
            del request.overdue[base_len]
        waited_s, health = now - question.asked_at, self._health[drafter_id]
        health.silent_since = None
        if waited_s <= self.longest_wait_s:
            health.misses = 0
        health.round_trip.observe(waited_s)
        return waited_s

    def stop_waiting(self, requests: Iterable[Request] | None = None) -> None:
        """Drafts of these requests, or all drafts, that have not come are overdue from now on: a step begins, say."""
        for request in list(self.pending) if requests is None else requests:
            if (question := self.pending.pop(request, None)) is not None:
                _note_overdue(request, question)

    def expire(self, now: float) -> list[Question]:
        """Gives up, and returns, questions past their deadline, and all questions to a drafter whose breaker opens by that."""
        late = {question.drafter_id for question in self.pending.values() if now >= question.deadline}
        for drafter_id, health in self._health.items():
            since = health.silent_since
            if drafter_id in late or (since is not None and now >= since + health.round_trip.deadline_s(self.longest_wait_s)):
                late.add(drafter_id)
                health.misses, health.silent_since = health.misses + 1, None
        expired = []
        for request, question in list(self.pending.items()):
            if now >= question.deadline or (question.drafter_id in late and self._health[question.drafter_id].is_down):
                del self.pending[request]
                _note_overdue(request, question)
                expired.append(question)
        return expired

    def deadline(self) -> float | None:
        """The earliest deadline; None when no draft is waited for."""
        return min((question.deadline for question in self.pending.values()), default=None)

    def down(self) -> list[str]:
        """Drafters whose circuit breaker is open, sorted."""
        return sorted(drafter_id for drafter_id, health in self._health.items() if health.is_down)


def _note_overdue(request: Request, question: Question) -> None:
    request.overdue[question.base_len] = question
    while len(request.overdue) > REMEMBERED:
        del request.overdue[next(iter(request.overdue))]
