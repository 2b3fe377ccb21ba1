"""The fleet as the coordinator knows and publishes it: members, assignments, orders, operations.  Pure data, in any process.

Members (verifiers, drafters, gateways) report to the coordinator a few times a second; the answer carries their orders.
"""

from typing import Literal

import msgspec

from backend.fleet.stats import DrafterStats, VerifierStats

MemberKind = Literal["verifier", "drafter", "gateway"]
MemberState = Literal["starting", "ready", "draining", "lost"]


class Member(msgspec.Struct, frozen=True):
    """One process of the fleet, as it registers with the coordinator."""

    id: str
    kind: MemberKind
    incarnation: str
    """Random per process start: a restarted member has the same `id`, but another incarnation."""
    address: str
    """Where the member listens (`ipc://...` or `tcp://host:port`); empty for a gateway."""
    server_key: str
    """The member's CURVE public key (Z85) if `address` is tcp, else empty."""
    node: str
    """The Ray address of the member's node."""
    pid: int
    model: str
    state: MemberState = "starting"
    head: str = ""
    """Drafters only: directory of the head or draft model; empty: the fleet's own."""
    node_id: str = ""
    """The Ray node that the member runs on."""
    local_address: str = ""
    """A further address (`ipc://...`) for processes of the same node; empty: none."""
    cores: tuple[int, ...] = ()
    """CPU cores that the member is bound to; empty: not bound to cores."""
    takes_features: bool = True
    """Drafters only: a head needs features; a draft model needs only tokens."""
    swaps: int = 0
    """Drafters only: how often it was given another head.  A directory may have been written anew."""

    @property
    def route(self) -> tuple[str, str, str, str, int]:
        """What peers depend on.  If any of it changes, the member registers again, and its assignments get a new generation."""
        return self.incarnation, self.address, self.server_key, self.head, self.swaps


def reached_at(member: Member, node_id: str) -> str:
    """The address at which a process on that Ray node connects to a member."""
    return member.local_address if member.local_address and member.node_id == node_id else member.address


class DrafterRef(msgspec.Struct, frozen=True):
    """What a verifier must know about a drafter that is assigned to it."""

    id: str
    incarnation: str
    address: str
    server_key: str
    generation: int
    """The assignment's generation; grows with every change of this pair."""
    head: str = ""
    """`Member.head`; the verifier applies this head's projection to features."""
    takes_features: bool = True
    swaps: int = 0


class Orders(msgspec.Struct, frozen=True):
    """The coordinator's answer to a report.  `drafters`, in a stable order, are those assigned to a verifier."""

    known: bool
    """False: the coordinator restarted or the lease ran out; the member must register again."""
    drafters: list[DrafterRef] = msgspec.field(default_factory=list)
    drain: bool = False


class Assignment(msgspec.Struct, frozen=True):
    """One drafter serves one verifier."""

    verifier_id: str
    drafter_id: str
    generation: int


class Draining(msgspec.Struct, frozen=True):
    """A drain: the member takes no new requests; those it has may finish."""

    migrate: bool
    """Whether gateways move its requests elsewhere now: ordered, or the time to finish is over."""
    ordered: bool = True
    """False: the member's process is about to end by itself."""
    deadline_s: float | None = None
    """Seconds until its requests are moved; None: they may take as long as they need."""


class MemberView(msgspec.Struct, frozen=True):
    """A member in the fleet snapshot."""

    member: Member
    last_report_s: float
    """Seconds since its last report."""
    verifier: VerifierStats | None = None
    drafter: DrafterStats | None = None
    drain: Draining | None = None
    seen_version: int = 0
    """Gateways only: version of the last snapshot that the gateway has acted upon; else 0."""


OperationKind = Literal["add", "remove", "restart", "swap-drafter"]
OperationState = Literal["waiting", "running", "done", "failed"]


class Operation(msgspec.Struct, frozen=True):
    """A change of the fleet that the launcher carries out, one at a time."""

    id: int
    kind: OperationKind
    members: list[str]
    """The members concerned, in order of processing; for `add`, the members started so far."""
    state: OperationState = "waiting"
    note: str = ""
    """For people: what is being done, was done, or went wrong."""
    add: MemberKind | None = None
    """The kind of member that `add` starts."""
    path: str = ""
    """The directory of the head that `swap-drafter` loads."""
    migrate: bool = False
    """Whether requests are moved at once; else only after `deadline_s`."""
    deadline_s: float = 0.0
    force: bool = False
    """Whether `remove` and `restart` go on if requests are left after the deadline, which end with an error."""


class FleetSnapshot(msgspec.Struct, frozen=True):
    """The whole fleet at one moment."""

    version: int
    """Grows with every change of membership or assignment."""
    members: list[MemberView]
    assignments: list[Assignment]
    counters: dict[str, int]
    """`registrations`, `restarts`, `leases_expired`, `assignments_made`, `assignments_dropped`, `decisions`, and
    `reassignments`: dropped assignments whose verifier and drafter could both have gone on."""
    pins: dict[str, list[str]] = {}
    """Drafters that an operator has pinned, each with its verifiers."""
    coordinator: str = ""
    """A new name for each process of the coordinator; a restarted one has forgotten all orders."""
    operations: list[Operation] = []
    """Operations, the newest last; those that ended are kept for a while."""

    def view(self, member_id: str) -> MemberView | None:
        """The member of that id, if there is one."""
        return next((view for view in self.members if view.member.id == member_id), None)
