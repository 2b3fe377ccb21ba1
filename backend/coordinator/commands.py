"""Administrators' commands to a fleet, and the answers.  Pure data, in any process.

The command line and the gateway's `/admin` endpoints send the same commands to the coordinator, which checks them.
"""

from typing import Literal, get_args

import msgspec


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="command"):
    """Fields that all commands have."""

    if_version: int | None = None
    """Refuse the command unless the fleet is still at this version."""
    dry_run: bool = False
    """Answer with the effects, and change nothing."""


class Drain(Command, frozen=True, tag="drain"):
    """`member` takes no new work.  A verifier's requests finish there, or go on elsewhere."""

    member: str
    migrate: bool = False
    """Move its requests at once."""
    deadline_s: float | None = None
    """Move the requests that are left after so many seconds; None: they may take as long as they need."""
    force: bool = False
    """Drain even the last verifier that takes requests."""


class Resume(Command, frozen=True, tag="resume"):
    """Ends a drain."""

    member: str


class Remove(Command, frozen=True, tag="remove"):
    """Drains `member`, then ends its process for good."""

    member: str
    migrate: bool = False
    deadline_s: float | None = None
    force: bool = False
    """Remove even the last verifier.  Requests that are left after the deadline end with an error."""


class Add(Command, frozen=True, tag="add"):
    """Starts further members."""

    kind: Literal["verifier", "drafter"]
    count: int = 1


class Assign(Command, frozen=True, tag="assign"):
    """Pins `drafter` to `verifiers`: it serves no others, whatever the policy would decide.  None unpins it."""

    drafter: str
    verifiers: list[str] | None = None


class Restart(Command, frozen=True, tag="restart"):
    """Drains, ends and starts `members` again, one after the other.  None: every verifier and drafter."""

    members: list[str] | None = None
    migrate: bool = True
    deadline_s: float | None = None
    force: bool = False


class SwapDrafter(Command, frozen=True, tag="swap-drafter"):
    """`drafter` drafts with the head in directory `path` from the next round on.  A head that does not fit changes nothing."""

    drafter: str
    path: str


AnyCommand = Drain | Resume | Remove | Add | Assign | Restart | SwapDrafter
"""On the wire, the field `command` says which it is."""


COMMANDS: dict[str, type[AnyCommand]] = {str(each.__struct_config__.tag): each for each in get_args(AnyCommand)}
"""By their name in the field `command`."""

Reason = Literal["invalid", "unknown_member", "version_mismatch", "conflict", "last_verifier"]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command was taken, or would have been without `dry_run`."""

    version: int
    """The fleet's version afterwards."""
    effects: list[str]
    """What changes, in words; empty if the fleet already is as the command asks."""
    operation: int | None = None
    """The operation that carries the command out, if the launcher has to."""


class CommandRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The command was not taken, and nothing has changed."""

    reason: Reason
    message: str
    version: int


Answer = Done | CommandRefused
