"""The verifier as a Ray actor: a `VerifierProcess` and its membership.  Ray restarts it when it dies."""

from __future__ import annotations

import logging
import os
import uuid

import ray

from backend.config import Settings
from backend.coordinator.actor import CoordinatorHandle
from backend.fleet import Member, Orders
from backend.fleet.departure import Departure
from backend.fleet.membership import Membership, enter
from backend.models.resolve import ResolvedModels
from backend.transport import new_server_keys

logger = logging.getLogger(__name__)


class VerifierActor:
    """Constructed by `backend.launch`; ready when the constructor returns."""

    def __init__(
        self,
        *,
        member_id: str,
        settings: str,
        paths: ResolvedModels,
        address: str,
        namespace: str,
        cores: list[int],
        local_address: str = "",
    ) -> None:
        loaded = Settings.model_validate_json(settings)
        logging.basicConfig(level=loaded.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
        if cores:
            os.sched_setaffinity(0, cores)
        server_keys = new_server_keys() if address.startswith("tcp://") else None
        member = Member(
            id=member_id,
            kind="verifier",
            incarnation=uuid.uuid4().hex,
            address=address,
            server_key=server_keys.public if server_keys else "",
            node=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            model=paths.name,
            node_id=ray.get_runtime_context().get_node_id(),
            local_address=local_address,
            cores=tuple(cores),
        )
        coordinator = CoordinatorHandle.connect(namespace)
        credentials = enter(coordinator, member)
        # vLLM is imported only now: the fleet already knows that this member is starting.
        from backend.verifier.process import VerifierProcess

        self._process = VerifierProcess(
            member_id,
            member.incarnation,
            loaded,
            paths,
            address,
            credentials.fleet_keys,
            server_keys,
            local_address=local_address,
        )
        self._membership = Membership(coordinator, member, self._process.stats, self._obey)
        self._membership.join_fleet()
        self._process.start()
        self._membership.become("ready", self._process.address)
        limit_s = loaded.coordinator.drain_deadline_s
        Departure(self._membership, self._is_idle, self.stop, limit_s).on_sigterm()

    def ping(self) -> str:
        """For liveness checks."""
        return self._process.verifier_id

    def stop(self) -> None:
        """Ends serving; the actor's process is ended by whoever called."""
        self._membership.leave_fleet()
        self._process.stop()

    def _is_idle(self) -> bool:
        stats = self._process.stats()
        return stats is None or not stats.running + stats.waiting

    def _obey(self, orders: Orders) -> None:
        self._process.set_drafters(orders.drafters)
        self._membership.drain(orders.drain)
