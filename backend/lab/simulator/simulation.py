"""Simulates a fleet of thousands, event by event, under the coordinator's own policy.  Pure: all time is simulated.

Events are steps and drafts of each verifier, reports of each member, arrivals, failures, and a sample of everything once a
second.  Assignment is done by the real `backend.coordinator.policy.Coordinator`, with reports, orders and leases.  Routing is
the gateway's default.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from backend.coordinator.messages import Report
from backend.coordinator.policy import Coordinator
from backend.fleet import DraftCounters, DrafterStats, Member, MemberKind, VerifierStats
from backend.lab.simulator.arrivals import Arrival, Trouble
from backend.lab.simulator.members import Drafter, Hardware, Request, Verifier
from backend.routing.routers import Ask, Candidate, LeastLoaded

SAMPLE_S = 1.0


@dataclass
class Place:
    """A verifier as routing sees it.  Kept up to date, because making thousands anew for every request would take long."""

    id: str
    tokens: int = 0
    requests: int = 0
    routed: int = 0


@dataclass(frozen=True)
class Scenario:
    """The fleet, its requests and its failures."""

    verifiers: int
    drafters: int
    seconds: float
    arrivals: Sequence[Arrival]
    troubles: Sequence[Trouble] = ()
    hardware: Hardware = field(default_factory=Hardware)
    spread: float = 0.2
    """Largest relative deviation of a member's speed, and of a verifier's accepted tokens, from the given value."""
    length: float = 2.5
    report_s: float = 0.5
    skew: float = 0.0
    """Share of the requests that are routed among the first tenth of the verifiers only."""
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """The fleet at one moment; rates are over the preceding second."""

    at: float
    tokens_per_s: float
    requests: int
    slowest_tgs: float
    """Tokens per second of one request, at the slowest verifier that has requests."""
    mean_tgs: float
    pairs: int
    reassignments: int
    most_drafters: int
    """Largest number of drafters of one verifier."""


@dataclass
class Outcome:
    """The results of a simulation."""

    samples: list[Sample] = field(default_factory=list)
    tgs: list[float] = field(default_factory=list)
    """Of each finished request: tokens / seconds from its arrival to its last token."""
    tokens: float = 0.0
    failed_over: int = 0
    finished_at: float = 0.0
    """When the last finished request ended."""
    counters: dict[str, int] = field(default_factory=dict)


class FleetSimulation:
    """One run of a simulation."""

    def __init__(self, scenario: Scenario, coordinator: Coordinator) -> None:
        self.outcome = Outcome()
        self._scenario = scenario
        self._coordinator = coordinator
        self._router = LeastLoaded()
        self._dice = random.Random(scenario.seed)
        self._now = 0.0
        self._count = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._emitted_at_sample: dict[str, int] = {}
        self.verifiers = {f"v{i}": self._make_verifier(f"v{i}") for i in range(scenario.verifiers)}
        self.drafters = {f"d{i}": self._make_drafter(f"d{i}") for i in range(scenario.drafters)}
        self._members: dict[str, Verifier | Drafter] = {**self.verifiers, **self.drafters}
        self._places = {name: Place(name) for name in self.verifiers}
        self._open: list[Place] | None = None
        """Places of the live verifiers; None when it must be made anew."""

    def run(self) -> Outcome:
        self._begin()
        while self._events and self._events[0][0] <= self._scenario.seconds:
            self._now, _, event = heapq.heappop(self._events)
            event()
        outcome = self.outcome
        outcome.tokens = float(sum(each.stats.tokens for each in self.verifiers.values()))
        outcome.counters = self._coordinator.snapshot(self._now).counters
        return outcome

    # Events.

    def _begin(self) -> None:
        for name in (*self.verifiers, *self.drafters):
            self._register(name)
            self._at(self._dice.random() * self._scenario.report_s, partial(self._report, name))
        for number, arrival in enumerate(self._scenario.arrivals):
            self._at(arrival.at, partial(self._place, Request(number, arrival)))
        for trouble in self._scenario.troubles:
            self._at(trouble.at, partial(self._trouble, trouble))
        self._at(SAMPLE_S, self._sample)

    def _place(self, request: Request) -> None:
        """Routes a new request, or one whose verifier died."""
        if self._open is None:
            self._open = [self._places[name] for name, each in self.verifiers.items() if each.alive]
        places = self._open
        if self._dice.random() < self._scenario.skew:
            places = places[: max(len(places) // 10, 1)]
        # Places have all the fields that routing reads.  Making thousands of `Candidate`s per request would be too slow.
        chosen = self._router.choose(Ask(), cast("Sequence[Candidate]", places))
        if chosen is None:
            self._at(self._now + 1.0, lambda: self._place(request))
            return
        self._places[chosen].routed += 1
        verifier = self.verifiers[chosen]
        verifier.waiting.append(request)
        self._count_in(verifier, request, 1)
        if not verifier.is_stepping:
            self._step(verifier)

    def _step(self, verifier: Verifier) -> None:
        """Begins a step, and schedules its end after the target's computing time."""
        prompt = verifier.admit()
        verifier.is_stepping = bool(verifier.running)
        if not verifier.running:
            return
        served = [name for name in verifier.drafters if self.drafters[name].alive]
        drafted = served if served and verifier.wants_drafts() else []
        spent = (
            verifier.step_s(verifier.hardware.k if drafted else 0) + prompt * verifier.hardware.prefill_s * verifier.slowness
        )
        incarnation = verifier.incarnation
        self._at(self._now + spent, lambda: self._verified(verifier, incarnation, drafted, self._now - spent))

    def _verified(self, verifier: Verifier, incarnation: int, drafted: list[str], began: float) -> None:
        """Ends a step: emits tokens, has the next drafts made, and schedules the next step for when they are ready."""
        if not verifier.alive or verifier.incarnation != incarnation:
            return
        n = len(verifier.running)
        share = n / max(len(drafted), 1)
        tokens, ready = 1.0, self._now
        for name in drafted:
            drafter = self.drafters[name]
            if not drafter.alive:
                continue
            accepted = (verifier.length - 1) * drafter.quality / len(drafted)
            tokens += accepted
            counters = verifier.stats.drafters.setdefault(name, DraftCounters())
            counters.drafts += max(round(share), 1)
            counters.draft_tokens += max(round(share), 1) * verifier.hardware.k
            counters.accepted_tokens += round(max(share, 1) * accepted * len(drafted) * self._dice.uniform(0.9, 1.1))
            rows = verifier.held() / len(drafted) if name in verifier.fresh else 0.0
            verifier.fresh.discard(name)
            ready = max(ready, drafter.draft(share, rows, self._now))
        for request in verifier.advance(tokens):
            self._count_in(verifier, request, -1)
            self.outcome.finished_at = self._now
            self.outcome.tgs.append(request.arrival.response / max(self._now - request.arrival.at, 1e-9))
        if drafted:
            newest = (ready - began) / n
            verifier.cycle_s = newest if not verifier.cycle_s else 0.7 * verifier.cycle_s + 0.3 * newest
        self._at(ready, lambda: self._step(verifier) if verifier.incarnation == incarnation else None)

    def _report(self, name: str) -> None:
        self._at(self._now + self._scenario.report_s, lambda: self._report(name))
        member = self._members[name]
        if not member.alive:
            return
        verifier = member if isinstance(member, Verifier) else None
        stats = verifier.report() if verifier else None, member.report() if isinstance(member, Drafter) else None
        orders = self._coordinator.report(Report(name, str(member.incarnation), "ready", *stats), self._now)
        if not orders.known:
            self._register(name)
        elif verifier is not None:
            wanted = [ref.id for ref in orders.drafters]
            verifier.fresh |= set(wanted) - set(verifier.drafters)
            verifier.drafters = wanted

    def _trouble(self, trouble: Trouble) -> None:
        member = self._members[trouble.member]
        self._at(self._now + trouble.seconds, lambda: self._recover(trouble))
        if trouble.factor is not None:
            member.slowness *= trouble.factor
            return
        member.alive = False
        if isinstance(member, Verifier):
            member.is_stepping, self._open = False, None
            for request in member.drop_all():
                self.outcome.failed_over += 1
                self._count_in(member, request, -1)
                self._place(request)

    def _recover(self, trouble: Trouble) -> None:
        member = self._members[trouble.member]
        if trouble.factor is not None:
            member.slowness /= trouble.factor
            return
        member.alive, member.incarnation = True, member.incarnation + 1
        member.stats.started_at = self._now
        self._open = None
        if isinstance(member, Verifier):
            member.drafters, member.fresh = [], set()
        else:
            member.free_at = self._now
        self._register(trouble.member)

    def _sample(self) -> None:
        self._at(self._now + SAMPLE_S, self._sample)
        rates, total = [], 0.0
        for name, verifier in self.verifiers.items():
            emitted = verifier.stats.tokens - self._emitted_at_sample.get(name, 0)
            self._emitted_at_sample[name] = verifier.stats.tokens
            total += emitted
            if verifier.running:
                rates.append(emitted / SAMPLE_S / len(verifier.running))
        snapshot = self._coordinator.snapshot(self._now)
        held = Counter(pair.verifier_id for pair in snapshot.assignments)
        self.outcome.samples.append(
            Sample(
                at=self._now,
                tokens_per_s=total / SAMPLE_S,
                requests=sum(each.requests for each in self.verifiers.values()),
                slowest_tgs=min(rates, default=0.0),
                mean_tgs=sum(rates) / len(rates) if rates else 0.0,
                pairs=len(snapshot.assignments),
                reassignments=snapshot.counters["reassignments"],
                most_drafters=max(held.values(), default=0),
            )
        )

    # Details.

    def _count_in(self, verifier: Verifier, request: Request, sign: int) -> None:
        place = self._places[verifier.id]
        place.tokens += sign * (request.arrival.prompt + request.arrival.response)
        place.requests += sign

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _register(self, name: str) -> None:
        member = self._members[name]
        kind: MemberKind = "verifier" if isinstance(member, Verifier) else "drafter"
        self._coordinator.register(
            Member(name, kind, str(member.incarnation), f"sim://{name}", "", "sim", 0, "sim", "ready"), self._now
        )

    def _differing(self) -> float:
        return 1 + self._scenario.spread * self._dice.uniform(-1, 1)

    def _make_verifier(self, name: str) -> Verifier:
        stats = VerifierStats(name, 0.0, "auto", self._scenario.hardware.k)
        length = 1 + (self._scenario.length - 1) * self._differing()
        return Verifier(name, self._scenario.hardware, length, stats, slowness=self._differing())

    def _make_drafter(self, name: str) -> Drafter:
        quality = 1 + 0.2 * (self._differing() - 1)
        return Drafter(name, self._scenario.hardware, quality, self._differing(), DrafterStats(name, 0.0))
