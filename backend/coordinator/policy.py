"""Keeps the fleet's members under leases, and assigns drafters to verifiers.  Pure: events and `now` in, answers out.

Runs in the coordinator actor; tests and the simulator drive the same code with a clock of their own (`now` is seconds on any
clock that never goes back).  `tick` is the whole policy: it expires leases and decides the assignment.  It decides at once when
a member came, left or was pinned, else every `DECIDE_EVERY_S`.  The decision is a pure function of the situation
(`assignment.py`, `water_filling.py`).

Every change takes the next value of one counter.  That is the snapshot's version, and the generation of assignments made by the
change.  So generations only grow; they do so even over a restart of the coordinator if `first_version` comes from a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from backend.coordinator.assignment import (
    Action,
    AssignmentPolicy,
    Bind,
    DrafterSpeed,
    Pair,
    Situation,
    VerifierLoad,
)
from backend.coordinator.entries import Counters, Entry, route
from backend.coordinator.rates import VerifierRates
from backend.coordinator.water_filling import WaterFilling
from backend.fleet import (
    Assignment,
    DrafterRef,
    DrafterStats,
    FleetSnapshot,
    Member,
    MemberState,
    Orders,
    VerifierStats,
    reached_at,
)

FORGET_LOST_S = 60.0
"""A lost member stays in the snapshot for so long, so that people can see it."""
LEASE_S = 2.0
"""A member that does not report for so long is lost."""
START_LEASE_S = 120.0
"""Lease of a member that is starting: loading a model may block its interpreter, and its reports, for long."""
SPARE_SHARE_S = 5e-6
"""Least time between two decisions, per member, so that deciding does not take all the time while many join at once."""

UNKNOWN = Orders(known=False)

DECIDE_EVERY_S = 0.5
"""Time between two decisions while membership and pins do not change."""


@dataclass
class Coordinator:
    """The fleet's registry and its assignments.  Not thread-safe; one owner calls it."""

    lease_s: float
    first_version: int = 0
    rule: AssignmentPolicy = field(default_factory=WaterFilling)
    _entries: dict[str, Entry] = field(default_factory=dict)
    _since: dict[Pair, float] = field(default_factory=dict)
    """When each assigned pair was bound."""
    _generation: dict[Pair, int] = field(default_factory=dict)
    _drafters: dict[str, set[str]] = field(default_factory=dict)
    """Verifier -> its drafters."""
    _pins: dict[str, list[str]] = field(default_factory=dict)
    _verifier_rates: dict[str, VerifierRates] = field(default_factory=dict)
    _drafter_speeds: dict[str, DrafterSpeed] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    _version: int = field(init=False)
    _next_expiry: float = math.inf
    _decided_at: float = -math.inf
    _is_dirty: bool = False
    """Whether a member came, left, became fit or unfit, or was pinned since the last decision."""
    _fit: tuple[list[VerifierLoad], list[DrafterSpeed]] | None = None
    """The fit members, sorted; None after a change.  Kept, since sorting thousands takes longer than deciding."""

    def __post_init__(self) -> None:
        self._version = self.first_version

    # Events.

    def register(self, member: Member, now: float) -> None:
        """Adds a member, or takes it in again.  A known id with another incarnation is a restart: its bindings are dropped."""
        self._expire(now)
        self.counters.registrations += 1
        known = self._entries.get(member.id)
        if known is None or known.member != member or known.state != member.state:
            self._changed()
        entry = Entry(member, now, member.state)
        if known is not None:
            # A drain belongs to the member's id: it holds for the next process with this id, until the drain is ended.
            entry.drain, entry.migrate_at = known.drain, known.migrate_at
            if known.member.incarnation != member.incarnation:
                self.counters.restarts += 1
                self._forget_rates(member.id)
            else:
                entry = replace(known, member=member, heard=now, state=member.state)
            if route(known.member) != route(member):
                self._unbind_member(member.id)
        self._entries[member.id] = entry
        self._next_expiry = min(self._next_expiry, now + self._lease_of(entry))
        self.tick(now)

    def report(
        self,
        member_id: str,
        incarnation: str,
        state: MemberState,
        now: float,
        verifier: VerifierStats | None = None,
        drafter: DrafterStats | None = None,
        seen_version: int = 0,
    ) -> Orders:
        """Renews a lease and answers with the member's orders; `known=False` asks it to register again."""
        self._expire(now)
        entry = self._current(member_id, incarnation)
        if entry is None or entry.state == "lost":
            self.tick(now)
            return UNKNOWN
        entry.heard = now
        entry.seen_version = max(entry.seen_version, seen_version)
        if entry.state != state:
            entry.state = state
            self._changed()
            self._next_expiry = min(self._next_expiry, now + self._lease_of(entry))
        self._measure(entry, verifier, drafter, now)
        self.tick(now)
        return Orders(known=True, drafters=self._drafters_of(member_id), drain=entry.drain)

    def deregister(self, member_id: str, incarnation: str, now: float) -> None:
        """Removes a member that leaves.  Ignored if the incarnation is not the present one."""
        if self._current(member_id, incarnation) is None:
            return
        self._unbind_member(member_id)
        self._remove(member_id)
        self.tick(now)

    def drain(self, member_id: str, now: float, migrate_after_s: float | None = None) -> bool:
        """Orders a member to take no new work; False when there is no such member.

        A verifier's requests are moved elsewhere after `migrate_after_s`; None: never.  A later call replaces an earlier one.
        """
        entry = self._entries.get(member_id)
        if entry is None:
            return False
        migrate_at = None if migrate_after_s is None else now + migrate_after_s
        if not entry.drain or migrate_at != entry.migrate_at:
            entry.drain, entry.migrate_at = True, migrate_at
            self._changed()
        self.tick(now)
        return True

    def pin(self, drafter_id: str, verifier_ids: Sequence[str], now: float) -> None:
        """Has a drafter serve these verifiers, as far as they are fit, and no others.  An empty list takes it out of service.

        Members need not exist yet.  The pin holds until `unpin`.
        """
        self._pins[drafter_id] = list(dict.fromkeys(verifier_ids))
        self._is_dirty = True
        self.tick(now)

    def unpin(self, drafter_id: str, now: float) -> bool:
        """Gives a drafter back to the automatic assignment; False when it was not pinned."""
        if self._pins.pop(drafter_id, None) is None:
            return False
        self._is_dirty = True
        self.tick(now)
        return True

    def resume(self, member_id: str, now: float) -> bool:
        """Ends a drain; False when there is no such member."""
        entry = self._entries.get(member_id)
        if entry is None:
            return False
        if entry.drain:
            entry.drain, entry.migrate_at = False, None
            self._changed()
        self.tick(now)
        return True

    def changed(self) -> int:
        """Raises the version for a change of the fleet that is kept elsewhere, and returns it."""
        self._version += 1
        return self._version

    def tick(self, now: float) -> None:
        """Brings leases and assignments up to date."""
        self._expire(now)
        since = now - self._decided_at
        if since >= DECIDE_EVERY_S or (self._is_dirty and since >= SPARE_SHARE_S * len(self._entries)):
            self._decide(now)

    # Questions.

    @property
    def pins(self) -> Mapping[str, Sequence[str]]:
        """The pins in force: drafter -> verifiers."""
        return self._pins

    def situation(self, now: float) -> Situation:
        """All that a decision at `now` depends on."""
        if self._fit is None:
            fit = sorted(key for key, entry in self._entries.items() if entry.is_fit)
            self._fit = (
                [self._rates_of_verifier(key).load for key in fit if self._entries[key].member.kind == "verifier"],
                [self._speed_of_drafter(key) for key in fit if self._entries[key].member.kind == "drafter"],
            )
        return Situation(now, *self._fit, self._since, self._pins)

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet at `now`, with members and assignments sorted by id."""
        self.tick(now)
        if self._is_dirty:
            self._decide(now)
        return FleetSnapshot(
            version=self._version,
            members=[self._entries[key].view(now) for key in sorted(self._entries)],
            assignments=[
                Assignment(verifier, drafter, generation)
                for (verifier, drafter), generation in sorted(self._generation.items())
            ],
            counters=dict(vars(self.counters)),
        )

    # The policy's verbs.

    def _expire(self, now: float) -> None:
        if now <= self._next_expiry:
            return
        for member_id, entry in list(self._entries.items()):
            silent = now - entry.heard
            if entry.state == "lost":
                if silent > FORGET_LOST_S:
                    self._remove(member_id)
            elif silent > self._lease_of(entry):
                entry.state = "lost"
                self.counters.leases_expired += 1
                self._changed()
        # Reports only delay expiries, so none can happen before this time.
        self._next_expiry = min((e.heard + self._lease_of(e) for e in self._entries.values()), default=math.inf)

    def _decide(self, now: float) -> None:
        self._decided_at, self._is_dirty = now, False
        self.counters.decisions += 1
        self._carry_out(self.rule.decide(self.situation(now)), now)

    def _carry_out(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            pair = action.verifier, action.drafter
            if isinstance(action, Bind):
                self._bind(pair, now)
            else:
                self.counters.reassignments += all(self._is_fit(each) for each in pair)
                self._unbind(pair)

    # Details.

    def _changed(self) -> None:
        """Membership has changed: the next `tick` decides."""
        self._version += 1
        self._is_dirty, self._fit = True, None

    def _measure(self, entry: Entry, verifier: VerifierStats | None, drafter: DrafterStats | None, now: float) -> None:
        if verifier is not None:
            entry.verifier = verifier
            self._rates_of_verifier(entry.member.id).observe(verifier, now, self._drafter_speeds)
        if drafter is not None:
            entry.drafter = drafter
            if drafter.speed is not None:
                speed = self._speed_of_drafter(entry.member.id)
                speed.fixed_s, speed.per_request_s = drafter.speed.fixed_s, drafter.speed.per_request_s

    def _rates_of_verifier(self, member_id: str) -> VerifierRates:
        rates = self._verifier_rates.get(member_id)
        if rates is None:
            rates = self._verifier_rates[member_id] = VerifierRates(member_id)
        return rates

    def _speed_of_drafter(self, member_id: str) -> DrafterSpeed:
        speed = self._drafter_speeds.get(member_id)
        if speed is None:
            speed = self._drafter_speeds[member_id] = DrafterSpeed(member_id)
        return speed

    def _forget_rates(self, member_id: str) -> None:
        self._verifier_rates.pop(member_id, None)
        self._drafter_speeds.pop(member_id, None)

    def _remove(self, member_id: str) -> None:
        del self._entries[member_id]
        self._forget_rates(member_id)
        self._changed()

    def _current(self, member_id: str, incarnation: str) -> Entry | None:
        entry = self._entries.get(member_id)
        return entry if entry is not None and entry.member.incarnation == incarnation else None

    def _lease_of(self, entry: Entry) -> float:
        """Seconds without a report after which the member is lost, or a lost one is removed."""
        if entry.state == "lost":
            return FORGET_LOST_S
        return self.lease_s if entry.state != "starting" else max(self.lease_s, START_LEASE_S)

    def _is_fit(self, member_id: str) -> bool:
        entry = self._entries.get(member_id)
        return entry is not None and entry.is_fit

    def _drafters_of(self, verifier: str) -> list[DrafterRef]:
        refs, node_id = [], self._entries[verifier].member.node_id
        for drafter in sorted(self._drafters.get(verifier, ())):
            member = self._entries[drafter].member
            generation, address = self._generation[verifier, drafter], reached_at(member, node_id)
            refs.append(
                DrafterRef(
                    drafter,
                    member.incarnation,
                    address,
                    member.server_key,
                    generation,
                    member.head,
                    member.takes_features,
                )
            )
        return refs

    def _bind(self, pair: Pair, now: float) -> None:
        self._version += 1
        self._generation[pair], self._since[pair] = self._version, now
        self._drafters.setdefault(pair[0], set()).add(pair[1])
        self.counters.assignments_made += 1

    def _unbind(self, pair: Pair) -> None:
        self._version += 1
        del self._generation[pair], self._since[pair]
        self._drafters[pair[0]].discard(pair[1])
        self.counters.assignments_dropped += 1

    def _unbind_member(self, member_id: str) -> None:
        gone: Iterable[Pair] = [pair for pair in self._since if member_id in pair]
        for pair in gone:
            self._unbind(pair)
        self._changed()
