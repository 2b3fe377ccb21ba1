"""What an administrator may ask of a fleet, and the answers.  Pure data, in any process.

The command line sends these to the coordinator, and so does the gateway for its `/admin` endpoints: one check, one meaning.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="command"):
    """What all commands have."""

    if_version: int | None = None
    """Refused unless the fleet is still at this version."""
    dry_run: bool = False
    """Says what would happen, and changes nothing."""


class Drain(Command, frozen=True, tag="drain"):
    """`member` takes no new work.  A verifier's requests finish there, or go on elsewhere."""

    member: str
    migrate: bool = False
    """Move its requests at once."""
    deadline_s: float | None = None
    """Move those that are left after so many seconds; None: they may take as long as they need."""
    force: bool = False
    """Also the last verifier that takes requests."""


class Resume(Command, frozen=True, tag="resume"):
    """Ends a drain."""

    member: str


class Remove(Command, frozen=True, tag="remove"):
    """Drains `member`, then ends its process for good."""

    member: str
    migrate: bool = False
    deadline_s: float | None = None
    force: bool = False
    """Also the last verifier; and when requests are left after the deadline, they end with an error."""


class Add(Command, frozen=True, tag="add"):
    """Starts further members."""

    kind: Literal["verifier", "drafter"]
    count: int = 1


class Assign(Command, frozen=True, tag="assign"):
    """`drafter` serves `verifiers` and nobody else, whatever the policy thinks; None gives it back to the policy."""

    drafter: str
    verifiers: list[str] | None = None


class Restart(Command, frozen=True, tag="restart"):
    """One after the other: drained, ended, started again.  None: every verifier and drafter."""

    members: list[str] | None = None
    migrate: bool = True
    deadline_s: float | None = None
    force: bool = False


class SwapDrafter(Command, frozen=True, tag="swap-drafter"):
    """`drafter` drafts with the head in directory `path` from the next round on; one that does not fit changes nothing."""

    drafter: str
    path: str


AnyCommand = Drain | Resume | Remove | Add | Assign | Restart | SwapDrafter
"""Told apart by `command`."""


COMMANDS: dict[str, type[AnyCommand]] = {str(each.__struct_config__.tag): each for each in get_args(AnyCommand)}
"""As `command` names them."""

Reason = Literal["invalid", "unknown_member", "version_mismatch", "conflict", "last_verifier"]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command was taken (or would be: `dry_run`)."""

    version: int
    """The fleet's version afterwards."""
    effects: list[str]
    """What it changes, in words; empty when everything is as asked already."""
    operation: int | None = None
    """The operation that carries it out, where that takes time."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command was not taken, and nothing has changed."""

    reason: Reason
    message: str
    version: int


Answer = Done | Refused
