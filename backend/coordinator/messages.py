"""What the coordinator tells, beside the messages of `backend.fleet`.  Pure data, in any process."""

import msgspec

from backend.config.sources import CommandError
from backend.models.resolve import ResolvedModels
from backend.transport.sockets import ServerKeys


class CoordinatorUnavailable(CommandError):
    """The coordinator did not answer in time, or does not exist.  Members keep their last orders and try again."""


class FleetInfo(msgspec.Struct, frozen=True):
    """Given by the launcher to members, and to the coordinator for gateways and tools that join the fleet later."""

    settings_json: str
    """`Settings.model_dump_json()` of the fleet."""
    models: ResolvedModels
    fleet_keys: ServerKeys | None = None
    """The fleet's CURVE client key pair; None if all sockets are `ipc://`."""
