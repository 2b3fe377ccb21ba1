"""Keeps the fleet's members under leases, and assigns drafters to verifiers.  Pure: events and `now` in, answers out.

Runs in the coordinator actor; tests drive the same code with a clock of their own (`now` is seconds on any clock that never
goes back).  `tick` is the whole policy: it expires leases and decides the assignment.  It decides at once when a member came,
left or was pinned, else every `DECIDE_EVERY_S`.  The decision is a pure function of the situation (`assignment.py`,
`water_filling.py`).

Every change takes the next value of one counter.  That is the snapshot's version, and the generation of assignments made by the
change, and the id of an operation that it queues.  So these only grow, even over a restart of the coordinator if
`first_version` comes from a clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from backend.coordinator.assignment import Pair, Situation, VerifierLoad
from backend.coordinator.water_filling import decide
from backend.fleet import (
    Assignment,
    DrafterRef,
    DrafterStats,
    Draining,
    FleetSnapshot,
    Member,
    MemberState,
    MemberView,
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


COUNTED = (
    *("registrations", "restarts", "leases_expired", "decisions"),
    *("assignments_made", "assignments_dropped", "reassignments"),
)
"""The counters; `FleetSnapshot.counters` explains each."""


@dataclass
class MemberEntry:
    """One process; a restarted member gets a new entry."""

    member: Member
    heard: float
    state: MemberState
    seen_version: int = 0
    verifier: VerifierStats | None = None
    drafter: DrafterStats | None = None
    load: VerifierLoad = field(default_factory=VerifierLoad)
    """Verifiers only."""


@dataclass
class Coordinator:
    """The fleet's registry and its assignments.  Not thread-safe; one owner calls it."""

    lease_s: float = LEASE_S
    first_version: int = 0
    pins: dict[str, list[str]] = field(default_factory=dict, init=False)
    """The pins in force: drafter -> verifiers."""
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0), init=False)
    _entries: dict[str, MemberEntry] = field(default_factory=dict, init=False)
    _incarnations: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Member id -> its processes so far, the present one last."""
    _drains: dict[str, float | None] = field(default_factory=dict, init=False)
    """The drains in force: member id -> when to move its requests elsewhere (None: never).  They outlive its process."""
    _since: dict[Pair, float] = field(default_factory=dict, init=False)
    """When each assigned pair was bound."""
    _generations: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    """Verifier -> its drafters, each with the generation of the assignment."""
    _version: int = field(init=False)
    _next_expiry: float = field(default=math.inf, init=False)
    _decided_at: float = field(default=-math.inf, init=False)
    _is_dirty: bool = field(default=False, init=False)
    """Whether a member came, left, became fit or unfit, or was pinned since the last decision."""

    def __post_init__(self) -> None:
        self._version = self.first_version

    # Events.

    def register(self, member: Member, now: float) -> None:
        """Adds a member, or takes it in again.  A known id with another incarnation is a restart: its bindings are dropped.

        Ignored for an earlier incarnation, which was cut off and has come back after its successor.
        """
        self._expire(now)
        incarnations = self._incarnations.setdefault(member.id, [])
        if member.incarnation not in incarnations:
            incarnations.append(member.incarnation)
        if member.incarnation != incarnations[-1]:
            return
        self.counters["registrations"] += 1
        entry = known = self._entries.get(member.id)
        if known is None or (known.member, known.state) != (member, member.state):
            self.changed()
        if known is not None and known.member.route != member.route:
            self._unbind_member(member.id)
        if entry is None or entry.member.incarnation != member.incarnation:
            entry = self._entries[member.id] = MemberEntry(member, now, member.state)
            self.counters["restarts"] += known is not None
        entry.member, entry.heard, entry.state = member, now, member.state
        self._next_expiry = min(self._next_expiry, now + self._lease_of(entry))
        self.tick(now)

    def report(
        self,
        member_id: str,
        incarnation: str,
        stats: VerifierStats | DrafterStats | None,
        state: MemberState,
        now: float,
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
            self.changed()
            self._next_expiry = min(self._next_expiry, now + self._lease_of(entry))
        if isinstance(stats, VerifierStats):
            entry.verifier = stats
            entry.load.observe(stats, now)
        elif stats is not None:
            entry.drafter = stats
        self.tick(now)
        return Orders(known=True, drafters=self._drafters_of(entry.member), drain=member_id in self._drains)

    def deregister(self, member_id: str, incarnation: str, now: float) -> None:
        """Removes a member that leaves.  Ignored if the incarnation is not the present one."""
        if self._current(member_id, incarnation) is not None:
            self._unbind_member(member_id)
            del self._entries[member_id]
            self.tick(now)

    def drain(self, member_id: str, now: float, migrate_after_s: float | None = None) -> None:
        """Orders a member to take no new work; ignored if there is no such member.

        A verifier's requests are moved elsewhere after `migrate_after_s`; None: never.  A later call replaces an earlier one.
        The drain belongs to the member's id: it holds for later processes with this id, until it is ended.
        """
        if member_id in self._entries:
            self._drains[member_id] = None if migrate_after_s is None else now + migrate_after_s
            self.changed()
        self.tick(now)

    def resume(self, member_id: str, now: float) -> None:
        """Ends a drain, if there is one; the member may be away."""
        if member_id in self._drains:
            del self._drains[member_id]
            self.changed()
        self.tick(now)

    def pin(self, drafter_id: str, verifier_ids: Sequence[str] | None, now: float) -> None:
        """Has a drafter serve these verifiers, as far as they are fit, and no others.  An empty list takes it out of service.

        Members need not exist yet.  None gives the drafter back to the automatic assignment.
        """
        if verifier_ids is None:
            self.pins.pop(drafter_id, None)
        else:
            self.pins[drafter_id] = list(verifier_ids)
        self.changed()
        self.tick(now)

    def restore(self, before: FleetSnapshot, now: float) -> None:
        """Puts the drains and pins in force that are in a snapshot of the coordinator before a restart.

        Their members need not have registered again.
        """
        for view in before.members:
            if view.drain is not None and view.drain.ordered:
                left_s = view.drain.deadline_s
                self._drains[view.member.id] = None if left_s is None else now + left_s
        self.pins |= before.pins
        self.changed()
        self.tick(now)

    def changed(self) -> int:
        """The fleet has changed, here or in what is kept elsewhere: the next `tick` decides.  Returns the new version."""
        self._version += 1
        self._is_dirty = True
        return self._version

    def tick(self, now: float) -> None:
        """Brings leases and assignments up to date."""
        self._expire(now)
        since = now - self._decided_at
        if since >= DECIDE_EVERY_S or (self._is_dirty and since >= SPARE_SHARE_S * len(self._entries)):
            self._decide(now)

    # Questions.

    def situation(self, now: float) -> Situation:
        """All that a decision at `now` depends on."""
        fit = [(key, each) for key, each in sorted(self._entries.items()) if each.state == "ready" and key not in self._drains]
        verifiers = {key: entry.load for key, entry in fit if entry.member.kind == "verifier"}
        drafters = {key: each.drafter.speed if each.drafter else None for key, each in fit if each.member.kind == "drafter"}
        return Situation(now, verifiers, drafters, self._since, self.pins)

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet at `now`, with members and assignments sorted by id."""
        self.tick(now)
        if self._is_dirty:
            self._decide(now)
        return FleetSnapshot(
            version=self._version,
            members=[self._view(entry, now) for _, entry in sorted(self._entries.items())],
            assignments=[Assignment(*pair, self._generations[pair[0]][pair[1]]) for pair in sorted(self._since)],
            counters=dict(self.counters),
        )

    # The policy's verbs.

    def _expire(self, now: float) -> None:
        if now <= self._next_expiry:
            return
        for member_id, entry in list(self._entries.items()):
            if now - entry.heard <= self._lease_of(entry):
                continue
            if entry.state == "lost":
                del self._entries[member_id]
            else:
                entry.state = "lost"
                self.counters["leases_expired"] += 1
            self.changed()
        # Reports only delay expiries, so none can happen before this time.
        self._next_expiry = min((e.heard + self._lease_of(e) for e in self._entries.values()), default=math.inf)

    def _decide(self, now: float) -> None:
        self._decided_at, self._is_dirty = now, False
        self.counters["decisions"] += 1
        situation = self.situation(now)
        wanted = decide(situation)
        for pair in sorted(self._since.keys() - wanted):
            self.counters["reassignments"] += pair[0] in situation.verifiers and pair[1] in situation.drafters
            self._unbind(pair)
        for pair in sorted(wanted - self._since.keys()):
            self._bind(pair, now)

    # Details.

    def _current(self, member_id: str, incarnation: str) -> MemberEntry | None:
        entry = self._entries.get(member_id)
        return entry if entry is not None and entry.member.incarnation == incarnation else None

    def _view(self, entry: MemberEntry, now: float) -> MemberView:
        drain = self._draining(entry, now)
        state = "draining" if entry.state == "ready" and drain is not None else entry.state
        shown = msgspec.structs.replace(entry.member, state=state)
        return MemberView(shown, max(0.0, now - entry.heard), entry.verifier, entry.drafter, drain, entry.seen_version)

    def _draining(self, entry: MemberEntry, now: float) -> Draining | None:
        if entry.member.id in self._drains:
            migrate_at = self._drains[entry.member.id]
            left_s = None if migrate_at is None else max(0.0, migrate_at - now)
            return Draining(left_s == 0, deadline_s=left_s)
        # A member that reports itself as draining, without an order, is about to be ended from outside.
        return Draining(migrate=True, ordered=False) if entry.state == "draining" else None

    def _lease_of(self, entry: MemberEntry) -> float:
        """Seconds without a report after which the member is lost, or a lost one is removed."""
        if entry.state == "lost":
            return FORGET_LOST_S
        return self.lease_s if entry.state != "starting" else max(self.lease_s, START_LEASE_S)

    def _drafters_of(self, member: Member) -> list[DrafterRef]:
        """Its drafters as it must know them."""
        references = []
        for drafter_id, generation in sorted(self._generations.get(member.id, {}).items()):
            of = self._entries[drafter_id].member
            where = reached_at(of, member.node_id), of.server_key
            references.append(DrafterRef(of.id, of.incarnation, *where, generation, of.head, of.takes_features, of.swaps))
        return references

    def _bind(self, pair: Pair, now: float) -> None:
        self._version += 1
        self._since[pair] = now
        self._generations.setdefault(pair[0], {})[pair[1]] = self._version
        self.counters["assignments_made"] += 1

    def _unbind(self, pair: Pair) -> None:
        self._version += 1
        del self._since[pair], self._generations[pair[0]][pair[1]]
        self.counters["assignments_dropped"] += 1

    def _unbind_member(self, member_id: str) -> None:
        for pair in [pair for pair in self._since if member_id in pair]:
            self._unbind(pair)
        self.changed()
