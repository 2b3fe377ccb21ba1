"""Verifiers and drafters on paper.  Pure; `simulation.py` moves them from event to event.

A verifier's requests advance together: all that matters of one is at which total progress of its verifier it is done, so a step
costs the same however many run.  Times are not those of the model that the policy predicts with: a step's time is a line in its
tokens, a drafter takes its rounds strictly in turn, and a verifier finds out for itself when drafting does not pay.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from backend.fleet import DraftCounters, DrafterStats, VerifierStats
from backend.fleet.speed import Line
from backend.lab.simulator.arrivals import Arrival

PROBE_STEPS = 48
"""Steps without drafts after which drafting is tried again, as in mode `auto`."""


@dataclass(frozen=True)
class Hardware:
    """Times of one kind of member, in seconds."""

    step_s: float = 0.02
    """A verifier's step whatever its size, ..."""
    token_s: float = 0.0001
    """... per token in it, ..."""
    prefill_s: float = 0.00002
    """... and per token of a prompt."""
    draft_s: float = 0.004
    """A drafter's round whatever its size, ..."""
    draft_request_s: float = 0.0004
    """... per request in it, ..."""
    handover_s: float = 0.000002
    """... and per row that it has to compute when it takes a request over."""
    k: int = 4
    slots: int = 64


@dataclass
class Request:
    """One request, where it is now."""

    number: int
    arrival: Arrival
    emitted: float = 0.0
    joined_at: float = 0.0
    """Its verifier's progress when it was admitted, less what it had emitted before."""


@dataclass
class Verifier:
    """One verifier."""

    id: str
    hardware: Hardware
    length: float
    """Acceptance length with drafts of quality 1."""
    stats: VerifierStats
    slowness: float = 1.0
    alive: bool = True
    incarnation: int = 0
    is_stepping: bool = False
    drafters: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    """Drafters that have not drafted for it since they were assigned."""
    waiting: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    """A heap by the progress at which each is done."""
    progress: float = 0.0
    undrafted: int = 0
    cycle_s: float = 0.0
    """The last drafted step's time, its drafts included, per request in it."""

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return len(self.waiting) + len(self.running)

    def admit(self) -> int:
        """Takes what waits into the batch; returns the prompt tokens to compute."""
        tokens = 0
        while self.waiting and len(self.running) < self.hardware.slots:
            request = self.waiting.popleft()
            request.joined_at = self.progress - request.emitted
            heapq.heappush(self.running, (request.joined_at + request.arrival.response, request.number, request))
            tokens += request.arrival.prompt + round(request.emitted)
        return tokens

    def step_s(self, k: int, requests: int | None = None) -> float:
        """Time of a step over the running requests with `k` draft tokens each."""
        n = len(self.running) if requests is None else requests
        return self.slowness * (self.hardware.step_s + self.hardware.token_s * n * (1 + k))

    def wants_drafts(self) -> bool:
        """Whether the next step is drafted: unless that has lately been slower than doing without, now and then in any case."""
        if not self.drafters:
            return False
        n = len(self.running)
        plain = n / self.step_s(0)
        if not self.cycle_s or self.length / self.cycle_s >= plain or self.undrafted >= PROBE_STEPS:
            self.undrafted = 0
            return True
        self.undrafted += 1
        return False

    def advance(self, tokens: float) -> list[Request]:
        """Every running request emits so many; returns those that are done."""
        n = len(self.running)
        self.progress += tokens
        done = []
        while self.running and self.running[0][0] <= self.progress + 1e-9:
            done.append(heapq.heappop(self.running)[2])
        self.stats.steps += 1
        self.stats.verifications += n
        self.stats.tokens += round(n * tokens)
        return done

    def drop_all(self) -> list[Request]:
        """Gives up all requests, with what they have emitted so far."""
        given = [*self.waiting]
        for _, _, request in self.running:
            request.emitted = self.progress - request.joined_at
            given.append(request)
        self.waiting.clear()
        self.running.clear()
        return given

    def held(self) -> float:
        """Tokens of the running requests, prompts included."""
        return sum(self.progress - r.joined_at + r.arrival.prompt for _, _, r in self.running)

    def report(self) -> VerifierStats:
        """Counters as it would report them."""
        stats, n = self.stats, max(len(self.running), 1)
        drafters = {
            name: DraftCounters(drafts=each.drafts, draft_tokens=each.draft_tokens, accepted_tokens=each.accepted_tokens)
            for name, each in stats.drafters.items()
            if name in self.drafters
        }
        return VerifierStats(
            self.id,
            stats.started_at,
            "auto",
            self.hardware.k,
            steps=stats.steps,
            tokens=stats.tokens,
            verifications=stats.verifications,
            running=len(self.running),
            waiting=len(self.waiting),
            plain_step_s=self.step_s(0, n),
            drafted_step_s=self.step_s(self.hardware.k, n),
            drafters=drafters,
        )


@dataclass
class Drafter:
    """One drafter."""

    id: str
    hardware: Hardware
    quality: float
    speed: float
    """Times as slow as the hardware says."""
    stats: DrafterStats
    slowness: float = 1.0
    alive: bool = True
    incarnation: int = 0
    free_at: float = 0.0
    _line: Line = field(default_factory=Line)

    def draft(self, requests: float, rows: float, now: float) -> float:
        """Takes a round when it is its turn; returns when the drafts are there."""
        hardware = self.hardware
        spent = (
            self.slowness * self.speed * (hardware.draft_s + hardware.draft_request_s * requests + hardware.handover_s * rows)
        )
        self.free_at = max(self.free_at, now) + spent
        self.stats.batches += 1
        self.stats.rounds += 1
        self.stats.drafts += max(round(requests), 1)
        self.stats.draft_s += spent
        self.stats.busy_s += spent
        self._line.note(max(round(requests), 1), spent)
        return self.free_at

    def report(self) -> DrafterStats:
        """Counters as it would report them."""
        stats = self.stats
        return DrafterStats(
            self.id,
            stats.started_at,
            stats.rounds,
            batches=stats.batches,
            drafts=stats.drafts,
            draft_s=stats.draft_s,
            speed=self._line.read(),
        )
