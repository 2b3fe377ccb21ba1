"""The base class of verifiers and drafters as Ray actors.  Ray restarts an actor that dies.

The constructor starts the member's reports (`membership.py`), which register it, and its process, and returns when the member
serves.
In a cluster that the fleet joined, the launcher does not know the node on which Ray will place the actor.  So the addresses are
made here: one for other nodes, and the socket for processes of the same node.
"""

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import ray

from backend.config import Settings
from backend.config.logs import configure_logging
from backend.config.runtime import member_socket
from backend.config.settings import TransportSettings
from backend.coordinator import FleetInfo
from backend.coordinator.actor import CoordinatorHandle
from backend.fleet.members import Member, MemberKind, Orders
from backend.fleet.stats import DrafterStats, VerifierStats
from backend.member.departure import depart_on_sigterm
from backend.member.membership import Membership
from backend.models.resolve import ResolvedModels
from backend.transport import ServerKeys, new_server_keys


class MemberProcess(Protocol):
    """The serving part of a member, without Ray."""

    address: str
    """The address at which it listens; final once it has started."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def stats(self) -> VerifierStats | DrafterStats: ...


class MemberActor(ABC):
    """One member.

    `address` is `ipc://...`; without one the member listens on tcp, and processes of its node may reach it over ipc too.
    Raises what goes wrong at the start; Ray then gives it up.
    """

    kind: ClassVar[MemberKind]

    def __init__(self, *, member_id: str, info: FleetInfo, address: str, namespace: str, cores: Sequence[int] = ()) -> None:
        loaded, paths = Settings.model_validate_json(info.settings_json), info.models
        configure_logging(loaded.log_level, loaded.log_format)
        check_models(paths)
        if cores:
            os.sched_setaffinity(0, cores)
        server_keys = None if address else new_server_keys()
        node = str(ray.util.get_node_ip_address())
        head, takes_features = self._head(paths, member_id)
        member = Member(
            id=member_id,
            kind=self.kind,
            incarnation=uuid.uuid4().hex,
            address=address or tcp_address(loaded.transport, node),
            server_key=server_keys.public if server_keys else "",
            node=node,
            pid=os.getpid(),
            model=self._model(loaded, paths, member_id),
            head=head,
            takes_features=takes_features,
            node_id=ray.get_runtime_context().get_node_id(),
            local_address=member_socket() if server_keys else "",
            cores=tuple(cores),
        )
        self._process: Any = None
        self._membership = Membership(CoordinatorHandle.connect(namespace), member, self._stats, self._obey)
        self._membership.join_fleet()
        process = self._build(member, loaded, info, server_keys)
        process.start()
        self._process = process
        # The port of a tcp socket is known once it is bound.
        self._membership.become("ready", self._process.address)
        depart_on_sigterm(self._membership, self._is_idle, self.stop, loaded.gateway.drain_s)

    def stop(self) -> None:
        """Leaves the fleet and ends serving; the caller must end the actor's process."""
        self._membership.leave_fleet()
        self._process.stop()

    @abstractmethod
    def _build(self, member: Member, settings: Settings, info: FleetInfo, keys: ServerKeys | None) -> MemberProcess:
        """Makes the serving part; `keys`: of its own tcp socket, if it has one."""

    def _model(self, settings: Settings, paths: ResolvedModels, member_id: str) -> str:
        """The member's model, as shown to people."""
        return paths.name

    def _head(self, paths: ResolvedModels, member_id: str) -> tuple[str, bool]:
        """A drafter's `Member.head` and `Member.takes_features`."""
        return "", True

    def _stats(self) -> VerifierStats | DrafterStats | None:
        return self._process.stats() if self._process is not None else None

    def _is_idle(self) -> bool:
        """Whether the member has no work, so that it may end without loss."""
        return True

    def _obey(self, orders: Orders) -> None:
        self._membership.drain(orders.drain)


def check_models(paths: ResolvedModels) -> None:
    """Raises `FileNotFoundError` if this node lacks the models, which the launcher found on its own node."""
    for directory in (paths.target_dir, paths.drafter_dir, *(each.directory for each in paths.in_turn)):
        if directory is not None and not Path(directory).is_dir():
            node = ray.util.get_node_ip_address()
            raise FileNotFoundError(f"node {node} has no {directory}: every node needs the models at the same path")


def tcp_address(transport: TransportSettings, node: str) -> str:
    """Where a member listens for other nodes: as set, else at any free port of its node's Ray address."""
    host = transport.host or node
    return f"tcp://{f'[{host}]' if ':' in host else host}:{transport.ports or 0}"
