"""Messages between members and the coordinator, beside those of `backend.fleet`.  Pure data, in any process."""

import msgspec

from backend.config.sources import CommandError
from backend.fleet import DrafterStats, MemberState, VerifierStats
from backend.models.resolve import ResolvedModels
from backend.transport.sockets import ServerKeys


class CoordinatorUnavailable(CommandError):
    """The coordinator did not answer in time, or does not exist.  Members keep their last orders and try again."""


class FleetInfo(msgspec.Struct, frozen=True):
    """Given to the coordinator once, by the launcher, for gateways and tools that join the fleet later."""

    settings_json: str
    """`Settings.model_dump_json()` of the fleet."""
    models: ResolvedModels
    fleet_keys: ServerKeys | None = None
    """The fleet's CURVE client key pair; None if all sockets are `ipc://`."""


class Report(msgspec.Struct, frozen=True):
    """One member's report."""

    member_id: str
    incarnation: str
    state: MemberState
    stats: VerifierStats | DrafterStats | None = None
    seen_version: int = 0
    """From a gateway: the version of the snapshot that it acts on."""
