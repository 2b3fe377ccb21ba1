"""What members and the coordinator exchange besides `backend.fleet`.  Pure data, in any process."""

from __future__ import annotations

import msgspec

from backend.config.sources import CommandError
from backend.fleet import DrafterStats, MemberState, OperationState, VerifierStats
from backend.models.resolve import ResolvedModels
from backend.transport.sockets import ServerKeys


class CoordinatorUnavailable(CommandError):
    """The coordinator did not answer in time, or does not exist.  Members go on as they are and try again."""


class Credentials(msgspec.Struct, frozen=True):
    """What a member is given when it registers."""

    fleet_keys: ServerKeys | None
    """The fleet's CURVE client pair; None where every socket is `ipc://`."""


class FleetInfo(msgspec.Struct, frozen=True):
    """What the launcher tells the coordinator once, for gateways and tools that join the fleet later."""

    settings_json: str
    """`Settings.model_dump_json()` of the fleet."""
    models: ResolvedModels
    fleet_keys: ServerKeys | None = None


class Report(msgspec.Struct, frozen=True):
    """One member's report; at most one of `verifier` and `drafter` is set, by its kind."""

    member_id: str
    incarnation: str
    state: MemberState
    verifier: VerifierStats | None = None
    drafter: DrafterStats | None = None
    seen_version: int = 0
    """A gateway's: the snapshot it acts upon."""


class Progress(msgspec.Struct, frozen=True):
    """What the launcher tells of an operation."""

    operation: int
    state: OperationState
    note: str
    members: list[str] | None = None
    """Set where the operation has decided on its members itself (`add`)."""
