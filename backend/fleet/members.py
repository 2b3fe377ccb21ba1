"""The fleet as the coordinator knows it and tells it: members, assignments, orders, operations.  Pure data, in any process.

Members (verifiers, drafters, gateways) report to the coordinator a few times a second; the answer carries their orders.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backend.fleet.stats import DrafterStats, VerifierStats

MemberKind = Literal["verifier", "drafter", "gateway"]
MemberState = Literal["starting", "ready", "draining", "lost"]

NODE_HOST = "node"
"""Host part of a member's tcp address that stands for "the Ray address of the node you run on"."""


class Member(msgspec.Struct, frozen=True):
    """One process of the fleet as the coordinator knows it."""

    id: str
    kind: MemberKind
    incarnation: str
    """Random per process start: a restarted member is the same `id` with another incarnation."""
    address: str
    """Where it listens (`ipc://...` or `tcp://host:port`); empty for a gateway."""
    server_key: str
    """Its CURVE public key (Z85) when `address` is tcp, else empty."""
    node: str
    """The Ray address of its node."""
    pid: int
    model: str
    state: MemberState = "starting"
    head: str = ""
    """A drafter's: the directory of the head or draft model that it has instead of the fleet's own; empty: it has that."""
    node_id: str = ""
    """The Ray node it runs on."""
    local_address: str = ""
    """Where it also listens for processes of that node (`ipc://...`); empty: only at `address`."""
    cores: tuple[int, ...] = ()
    """CPU cores it is bound to; empty: it computes elsewhere, or wherever there is room."""
    takes_features: bool = True
    """A drafter's: whether it has a head; a draft model needs tokens alone."""


def reached_at(member: Member, node_id: str) -> str:
    """The address at which a process on that Ray node connects to a member."""
    return member.local_address if member.local_address and member.node_id == node_id else member.address


class DrafterRef(msgspec.Struct, frozen=True):
    """A drafter as one of its verifiers needs to know it."""

    id: str
    incarnation: str
    address: str
    server_key: str
    generation: int
    """The assignment's generation; grows with every change of this pair."""
    head: str = ""
    """The directory of the head that it has instead of the fleet's own: the verifier applies that head's projection."""
    takes_features: bool = True


class Orders(msgspec.Struct, frozen=True):
    """The coordinator's answer to a report.  `drafters` is for verifiers, in a stable order."""

    known: bool
    """False: the coordinator does not know this incarnation (it restarted, or the lease ran out); register again."""
    drafters: list[DrafterRef] = msgspec.field(default_factory=list)
    drain: bool = False


class Assignment(msgspec.Struct, frozen=True):
    """One drafter bound to one verifier."""

    verifier_id: str
    drafter_id: str
    generation: int


class Draining(msgspec.Struct, frozen=True):
    """A member takes no new work; what it has may finish."""

    migrate: bool
    """Gateways move its requests elsewhere now: that was asked for, or the time to finish is over."""
    ordered: bool = True
    """False: nobody asked for it, the member itself is about to end."""


class MemberView(msgspec.Struct, frozen=True):
    """A member in the fleet snapshot."""

    member: Member
    last_report_s: float
    """Seconds since its last report."""
    verifier: VerifierStats | None = None
    drafter: DrafterStats | None = None
    drain: Draining | None = None
    seen_version: int = 0
    """The last snapshot a gateway has acted upon; 0 for other members."""


OperationKind = Literal["add", "remove", "restart", "swap-drafter"]
OperationState = Literal["waiting", "running", "done", "failed"]


class Operation(msgspec.Struct, frozen=True):
    """A change of the fleet that the launcher carries out, one at a time."""

    id: int
    kind: OperationKind
    members: list[str]
    """The members it is about, in the order they are dealt with; of `add`, those that it has started."""
    state: OperationState = "waiting"
    note: str = ""
    """What is being done, was done, or went wrong."""
    add: MemberKind | None = None
    """What `add` is to start."""
    path: str = ""
    """The head that `swap-drafter` is to load."""
    migrate: bool = False
    """Requests are moved at once; else only after `deadline_s`."""
    deadline_s: float = 0.0
    force: bool = False
    """`remove` and `restart` go on although requests are left after the deadline; they end with an error."""


class FleetSnapshot(msgspec.Struct, frozen=True):
    """The whole fleet at one moment."""

    version: int
    """Grows with every change of membership or assignment."""
    members: list[MemberView]
    assignments: list[Assignment]
    counters: dict[str, int]
    """`registrations`, `restarts`, `leases_expired`, `assignments_made`, `assignments_dropped`, and of the latter
    `reassignments`: those whose both ends were fit to go on; `decisions`."""
    pins: dict[str, list[str]] = {}
    """Drafters that an administrator has bound, and to which verifiers."""
    coordinator: str = ""
    """Another name for each process of the coordinator: one that Ray has restarted remembers no orders."""
    operations: list[Operation] = []
    """Changes that take time, the newest last; those that ended are kept for a while."""
