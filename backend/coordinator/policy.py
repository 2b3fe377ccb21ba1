"""Membership under leases, and the assignment of drafters to verifiers.  Pure: events and `now` in, answers out.

Runs in the coordinator actor; tests and the simulator drive the same code with a clock of their own (`now` is seconds on any
clock that never goes back).  `tick` is the whole policy: expire leases, drop the bindings of those who are gone, bind the
drafters that are free, even out what is lopsided.  Every change takes the next value of one counter, which serves as the
snapshot's version and as the generation of the assignments made at that moment; so generations only grow, and they go on
growing over a restart of the coordinator when `first_version` comes from a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from backend.fleet import (
    Assignment,
    DrafterRef,
    DrafterStats,
    Draining,
    FleetSnapshot,
    Member,
    MemberKind,
    MemberState,
    MemberView,
    Orders,
    VerifierStats,
)

FORGET_LOST_S = 60.0
"""A lost member stays in the snapshot for so long, so that people see it."""
START_LEASE_S = 120.0
"""A member that starts is not expected to report: loading a model may hold its interpreter for long."""
LEND_AFTER_S = 5.0
"""A verifier idle for so long, bound for so long, lends its drafter to one that has work and no drafter."""

UNKNOWN = Orders(known=False)


@dataclass
class _Entry:
    member: Member
    heard: float
    state: MemberState
    drain: bool = False
    migrate_at: float | None = None
    """When the requests of a draining verifier are to be moved; None: never."""
    seen_version: int = 0
    idle_since: float | None = None
    verifier: VerifierStats | None = None
    drafter: DrafterStats | None = None

    @property
    def load(self) -> int:
        """Requests running and waiting on a verifier."""
        return 0 if self.verifier is None else self.verifier.running + self.verifier.waiting

    def view(self, now: float) -> MemberView:
        member = self.member
        shown = Member(
            id=member.id,
            kind=member.kind,
            incarnation=member.incarnation,
            address=member.address,
            server_key=member.server_key,
            node=member.node,
            pid=member.pid,
            model=member.model,
            state="draining" if self.drain and self.state == "ready" else self.state,
        )
        heard = max(0.0, now - self.heard)
        return MemberView(shown, heard, self.verifier, self.drafter, self._drain(now), self.seen_version)

    def _drain(self, now: float) -> Draining | None:
        if self.drain:
            return Draining(self.migrate_at is not None and now >= self.migrate_at)
        # A member that drains of itself is about to be ended by somebody else.
        return Draining(True) if self.state == "draining" else None


def _route(member: Member) -> tuple[str, str, str]:
    """What the peers of a member connect to; another route needs another generation."""
    return member.incarnation, member.address, member.server_key


@dataclass(frozen=True)
class _Binding:
    generation: int
    since: float


@dataclass
class _Counters:
    registrations: int = 0
    restarts: int = 0
    leases_expired: int = 0
    assignments_made: int = 0
    assignments_dropped: int = 0


@dataclass
class Coordinator:
    """The fleet's registry and its assignments.  Not thread-safe; one owner calls it."""

    lease_s: float
    first_version: int = 0
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _bindings: dict[tuple[str, str], _Binding] = field(default_factory=dict)
    """By (verifier, drafter).  Today's rule binds a drafter to one verifier at most; the structure would hold more."""
    _counters: _Counters = field(default_factory=_Counters)
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._version = self.first_version

    # Events.

    def register(self, member: Member, now: float) -> None:
        """Takes a member in.  A known id with another incarnation is a restart: its bindings are dropped."""
        self._counters.registrations += 1
        known = self._entries.get(member.id)
        if known is None or known.member != member or known.state != member.state:
            self._version += 1
        entry = _Entry(member, now, member.state)
        if known is not None:
            # A drain is about the place in the fleet: it holds for the next process there, until it is ended.
            entry.drain, entry.migrate_at = known.drain, known.migrate_at
            if known.member.incarnation != member.incarnation:
                self._counters.restarts += 1
            else:
                entry = replace(known, member=member, heard=now, state=member.state)
            if _route(known.member) != _route(member):
                self._unbind_member(member.id)
        self._entries[member.id] = entry
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
        self.tick(now)
        entry = self._current(member_id, incarnation)
        if entry is None or entry.state == "lost":
            return UNKNOWN
        entry.heard = now
        entry.seen_version = max(entry.seen_version, seen_version)
        if entry.state != state:
            entry.state = state
            self._version += 1
        entry.verifier, entry.drafter = verifier or entry.verifier, drafter or entry.drafter
        if entry.load:
            entry.idle_since = None
        elif entry.idle_since is None:
            entry.idle_since = now
        self.tick(now)
        return Orders(known=True, drafters=self._drafters_of(member_id), drain=entry.drain)

    def deregister(self, member_id: str, incarnation: str, now: float) -> None:
        """Lets a member go; an incarnation that is not the present one is ignored."""
        if self._current(member_id, incarnation) is None:
            return
        self._unbind_member(member_id)
        del self._entries[member_id]
        self._version += 1
        self.tick(now)

    def drain(self, member_id: str, now: float, migrate_after_s: float | None = None) -> bool:
        """Orders a member to take no new work; False when there is no such member.

        A verifier's requests are moved elsewhere after `migrate_after_s`, never with None.  Asked again, the latest word holds.
        """
        entry = self._entries.get(member_id)
        if entry is None:
            return False
        migrate_at = None if migrate_after_s is None else now + migrate_after_s
        if not entry.drain or migrate_at != entry.migrate_at:
            entry.drain, entry.migrate_at = True, migrate_at
            self._version += 1
        self.tick(now)
        return True

    def resume(self, member_id: str, now: float) -> bool:
        """Ends a drain; False when there is no such member."""
        entry = self._entries.get(member_id)
        if entry is None:
            return False
        if entry.drain:
            entry.drain, entry.migrate_at = False, None
            self._version += 1
        self.tick(now)
        return True

    def changed(self) -> int:
        """Something about the fleet changed that is kept elsewhere; returns the version from here on."""
        self._version += 1
        return self._version

    def tick(self, now: float) -> None:
        """Brings leases and assignments up to date."""
        self._expire(now)
        self._drop_unfit()
        self._bind_free(now)
        self._even_out(now)
        self._lend(now)

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet at `now`, members and assignments in the order of their ids."""
        self.tick(now)
        return FleetSnapshot(
            version=self._version,
            members=[self._entries[key].view(now) for key in sorted(self._entries)],
            assignments=[
                Assignment(verifier, drafter, binding.generation)
                for (verifier, drafter), binding in sorted(self._bindings.items())
            ],
            counters=dict(vars(self._counters)),
        )

    # The policy's verbs.

    def _expire(self, now: float) -> None:
        for member_id, entry in list(self._entries.items()):
            silent = now - entry.heard
            if entry.state == "lost":
                if silent > FORGET_LOST_S:
                    del self._entries[member_id]
                    self._version += 1
            elif silent > (self.lease_s if entry.state != "starting" else max(self.lease_s, START_LEASE_S)):
                entry.state = "lost"
                self._counters.leases_expired += 1
                self._version += 1

    def _drop_unfit(self) -> None:
        for verifier, drafter in list(self._bindings):
            if not (self._fit(verifier) and self._fit(drafter)):
                self._unbind(verifier, drafter)

    def _bind_free(self, now: float) -> None:
        """Each free drafter goes to the verifier with the fewest drafters; of those, to the most loaded."""
        bound = {drafter for _, drafter in self._bindings}
        for drafter in self._fit_ids("drafter"):
            verifiers = self._fit_ids("verifier")
            if drafter not in bound and verifiers:
                self._bind(min(verifiers, key=self._need), drafter, now)

    def _even_out(self, now: float) -> None:
        """Moves drafters while one verifier has two more than another: a verifier came after they were given out."""
        while verifiers := self._fit_ids("verifier"):
            poorest, richest = min(verifiers, key=self._need), max(verifiers, key=self._need)
            if len(self._bound_to(richest)) - len(self._bound_to(poorest)) < 2:
                return
            self._move(self._newest(richest), richest, poorest, now)

    def _lend(self, now: float) -> None:
        """A verifier without work gives its drafter to one that has work and none; dwell times keep this from flapping."""
        starving = [v for v in self._fit_ids("verifier") if self._entries[v].load and not self._bound_to(v)]
        for verifier in sorted(starving, key=self._need):
            lenders = [v for v in self._fit_ids("verifier") if self._may_lend(v, now)]
            if lenders:
                lender = max(lenders, key=self._need)
                self._move(self._newest(lender), lender, verifier, now)

    # Details.

    def _may_lend(self, verifier: str, now: float) -> bool:
        idle_since, held = self._entries[verifier].idle_since, self._bound_to(verifier)
        if idle_since is None or not held:
            return False
        newest = self._bindings[verifier, self._newest(verifier)]
        return now - idle_since >= LEND_AFTER_S and now - newest.since >= LEND_AFTER_S

    def _current(self, member_id: str, incarnation: str) -> _Entry | None:
        entry = self._entries.get(member_id)
        return entry if entry is not None and entry.member.incarnation == incarnation else None

    def _fit(self, member_id: str) -> bool:
        entry = self._entries.get(member_id)
        return entry is not None and entry.state == "ready" and not entry.drain

    def _fit_ids(self, kind: MemberKind) -> list[str]:
        return [key for key in sorted(self._entries) if self._entries[key].member.kind == kind and self._fit(key)]

    def _need(self, verifier: str) -> tuple[int, int, str]:
        """Sorts first who should be served first."""
        return len(self._bound_to(verifier)), -self._entries[verifier].load, verifier

    def _bound_to(self, verifier: str) -> list[str]:
        return [drafter for holder, drafter in self._bindings if holder == verifier]

    def _newest(self, verifier: str) -> str:
        return max(self._bound_to(verifier), key=lambda drafter: self._bindings[verifier, drafter].generation)

    def _drafters_of(self, verifier: str) -> list[DrafterRef]:
        refs = []
        for drafter in sorted(self._bound_to(verifier)):
            member = self._entries[drafter].member
            generation = self._bindings[verifier, drafter].generation
            refs.append(DrafterRef(drafter, member.incarnation, member.address, member.server_key, generation))
        return refs

    def _bind(self, verifier: str, drafter: str, now: float) -> None:
        self._version += 1
        self._bindings[verifier, drafter] = _Binding(self._version, now)
        self._counters.assignments_made += 1

    def _unbind(self, verifier: str, drafter: str) -> None:
        self._version += 1
        del self._bindings[verifier, drafter]
        self._counters.assignments_dropped += 1

    def _move(self, drafter: str, old: str, new: str, now: float) -> None:
        self._unbind(old, drafter)
        self._bind(new, drafter, now)

    def _unbind_member(self, member_id: str) -> None:
        for verifier, drafter in list(self._bindings):
            if member_id in (verifier, drafter):
                self._unbind(verifier, drafter)
