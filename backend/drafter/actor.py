"""The drafter as a Ray actor: registers with the coordinator, serves, and reports.

Three threads: Ray's (constructor, `ping`, `swap_head`, `stop`), the drafting thread (`process.py`), and the membership's.
Should the drafting thread die, the process exits, for Ray to restart it: a drafter that answers pings and no rounds helps
nobody.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence

import ray

from backend.config.settings import Settings
from backend.coordinator.actor import CoordinatorHandle
from backend.drafter.process import DrafterModel, DrafterProcess, pin_cores
from backend.fleet import Member, Orders
from backend.fleet.departure import Departure
from backend.fleet.membership import Membership, enter
from backend.models.head_config import CheckpointError
from backend.models.resolve import ResolvedModels
from backend.tracing import open_tracing
from backend.transport.sockets import Wire, new_server_keys

logger = logging.getLogger(__name__)

CRASHED = 70
"""Exit status after the drafting thread's death."""


class DrafterActor:
    """One drafter.  `settings` is `Settings.model_dump_json()`.

    `address` is `ipc://...` or `tcp://host:port` (port 0: any), `local_address` another ipc one for processes of the same node.
    """

    def __init__(
        self,
        member_id: str,
        settings: str,
        paths: ResolvedModels,
        address: str,
        namespace: str,
        cores: Sequence[int] = (),
        local_address: str = "",
    ) -> None:
        pin_cores(cores)
        parsed = Settings.model_validate_json(settings)
        server_keys = new_server_keys() if address.startswith("tcp://") else None
        member = Member(
            id=member_id,
            kind="drafter",
            incarnation=secrets.token_hex(8),
            address=address,
            server_key=server_keys.public if server_keys else "",
            node=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            model=parsed.drafter,
            node_id=ray.get_runtime_context().get_node_id(),
            local_address=local_address,
            cores=tuple(cores),
        )
        coordinator = CoordinatorHandle.connect(namespace)
        # A tcp socket cannot be bound before the fleet's keys are known, nor its port be told before it is bound.
        credentials = enter(coordinator, member)
        self._process = DrafterProcess(
            member_id,
            DrafterModel(paths.target_dir, paths.drafter_dir),
            parsed.drafting,
            address,
            Wire(credentials.fleet_keys),
            server_keys,
            on_crash=_exit,
            tracing=open_tracing(parsed.tracing, "drafter", member_id),
            local_address=local_address,
        )
        self._process.start()
        self._membership = Membership(coordinator, member, self._process.stats, self._obey)
        self._membership.become("ready", self._process.address)
        self._membership.join_fleet()
        # Verifiers let go of it within a report or two, and need nothing from it.
        Departure(self._membership, lambda: True, self.stop, parsed.coordinator.drain_deadline_s).on_sigterm()

    def ping(self) -> bool:
        """For liveness checks."""
        return self._process.is_alive

    def swap_head(self, head_dir: str) -> str | None:
        """Drafts with another head from now on; why not, when it does not fit.  Verifiers learn of it from the coordinator."""
        try:
            self._process.swap_head(head_dir)
        except (CheckpointError, TimeoutError) as error:
            return str(error)
        self._membership.take_head(head_dir)
        return None

    def stop(self) -> None:
        """Leaves the fleet and ends serving."""
        self._membership.leave_fleet()
        self._process.stop()

    def _obey(self, orders: Orders) -> None:
        # Verifiers take their requests elsewhere; what they still send is answered.
        self._membership.drain(orders.drain)


def _exit() -> None:
    logging.shutdown()
    os._exit(CRASHED)
