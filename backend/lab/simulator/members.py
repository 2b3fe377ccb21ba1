"""Simulated verifiers and drafters.  Pure; `simulation.py` moves them from event to event.

All requests of a verifier advance at the same rate.  So a request is stored with the total progress of its verifier at which
it is done, and simulating a step takes the same time for any number of requests.  Simulated times deliberately do not follow
the model with which the policy predicts: a step's time is linear in its tokens, a drafter works on one round at a time in order
of arrival, and each verifier finds out for itself whether drafting pays.
"""

from __future__ import annotations

import heapq
from collections import deque
from copy import copy
from dataclasses import dataclass, field

import msgspec

from backend.fleet import DrafterStats, VerifierStats
from backend.fleet.speed import Line
from backend.lab.simulator.arrivals import Arrival

PROBE_STEPS = 48
"""Steps without drafts after which drafting is tried again, as in mode `auto`."""


@dataclass(frozen=True)
class Hardware:
    """Times of one kind of member, in seconds."""

    step_s: float = 0.02
    """A verifier's step: constant part."""
    token_s: float = 0.0001
    """A verifier's step: part per token verified."""
    prefill_s: float = 0.00002
    """A verifier's step: part per prompt token."""
    draft_s: float = 0.004
    """A drafter's round: constant part."""
    draft_request_s: float = 0.0004
    """A drafter's round: part per request."""
    handover_s: float = 0.000002
    """A drafter's round: part per feature row of a hand-over."""
    k: int = 4
    slots: int = 64


@dataclass
class Request:
    """One request and its progress."""

    number: int
    arrival: Arrival
    emitted: float = 0.0
    joined_at: float = 0.0
    """Its verifier's progress when the request was admitted, minus the tokens that the request had emitted before."""


@dataclass
class Verifier:
    """A simulated verifier."""

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
    """Drafters that have not drafted for this verifier since they were assigned to it."""
    waiting: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    """A heap of requests, by the progress at which each is done."""
    progress: float = 0.0
    undrafted: int = 0
    cycle_s: float = 0.0
    """Smoothed time of a drafted step, drafting included, divided by its requests; 0 before the first."""

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def admit(self) -> int:
        """Moves waiting requests into free slots of the batch; returns the prompt tokens to compute."""
        tokens = 0
        while self.waiting and len(self.running) < self.hardware.slots:
            request = self.waiting.popleft()
            request.joined_at = self.progress - request.emitted
            heapq.heappush(self.running, (request.joined_at + request.arrival.response, request.number, request))
            tokens += request.arrival.prompt + round(request.emitted)
        return tokens

    def step_s(self, k: int, requests: int | None = None) -> float:
        """Seconds of a step over `requests` (default: the running ones) with `k` draft tokens each."""
        n = len(self.running) if requests is None else requests
        return self.slowness * (self.hardware.step_s + self.hardware.token_s * n * (1 + k))

    def wants_drafts(self) -> bool:
        """Whether the next step is drafted: if drafting is at least as fast as plain decoding, or a probe is due."""
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
        """Lets every running request emit `tokens`; returns the requests that are done."""
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
        """Removes and returns all requests; each keeps the number of tokens that it has emitted."""
        given = [*self.waiting]
        for _, _, request in self.running:
            request.emitted = self.progress - request.joined_at
            given.append(request)
        self.waiting.clear()
        self.running.clear()
        return given

    def held(self) -> float:
        """Total tokens of the running requests, prompts included."""
        return sum(self.progress - r.joined_at + r.arrival.prompt for _, _, r in self.running)

    def report(self) -> VerifierStats:
        """The counters that a real verifier would report."""
        n = max(len(self.running), 1)
        return msgspec.structs.replace(
            self.stats,
            running=len(self.running),
            waiting=len(self.waiting),
            plain_step_s=self.step_s(0, n),
            drafted_step_s=self.step_s(self.hardware.k, n),
            drafters={name: copy(each) for name, each in self.stats.drafters.items() if name in self.drafters},
        )


@dataclass
class Drafter:
    """A simulated drafter."""

    id: str
    hardware: Hardware
    quality: float
    speed: float
    """Factor on the hardware's times: 2 is half as fast."""
    stats: DrafterStats
    slowness: float = 1.0
    alive: bool = True
    incarnation: int = 0
    free_at: float = 0.0
    _line: Line = field(default_factory=Line)

    def draft(self, requests: float, rows: float, now: float) -> float:
        """Queues a round behind earlier ones; returns the time at which its drafts are ready."""
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
        """The counters that a real drafter would report."""
        return msgspec.structs.replace(self.stats, speed=self._line.read())
