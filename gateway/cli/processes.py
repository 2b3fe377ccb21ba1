"""Runs a gateway's processes: the first one, which is the command `serve` or `gateway` itself, and further ones on its port.

The heavy imports are inside the functions, so that configuration errors come at once.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import sources
from backend.config.logs import configure_logging
from backend.config.sources import Loaded
from gateway.cli.signals import signals

if TYPE_CHECKING:
    from backend.config import Settings
    from backend.coordinator.actor import CoordinatorHandle
    from backend.coordinator.messages import FleetInfo
    from gateway.peers import Peers

GATEWAY_PROCESS = "gateway-process"
"""The command with which the first gateway process on a port starts the others; not for users."""


def run_gateway(
    settings: Settings,
    info: FleetInfo,
    coordinator: CoordinatorHandle,
    announce: Callable[[str], None] | None,
    arguments: list[str],
    peers: Peers,
) -> None:
    """Serves HTTP until a signal ends it.  Meanwhile the server handles the signals itself."""
    from backend.coordinator import CoordinatorUnavailable
    from backend.launch.fleet import gateway_member
    from backend.transport import Wire
    from gateway.fleet.directory import Directory
    from gateway.http.server import GatewayServer

    member = gateway_member(info.models.name)

    def ready(url: str) -> None:
        if announce is not None:
            announce(url)
        server.gateway.client.grammars.warm_up()

    try:
        server = GatewayServer(
            settings,
            Directory(coordinator, member),
            info.models.target_dir,
            model_name=info.models.name,
            wire=Wire(info.fleet_keys, node_id=member.node_id),
            on_ready=ready,
            read_settings=lambda: sources.load(arguments).settings,
            peers=peers,
        )
        server.run()
    finally:
        try:
            coordinator.deregister(member.id, member.incarnation)
        except CoordinatorUnavailable:
            logging.getLogger(__name__).debug("the coordinator was gone first")


@contextmanager
def joined_fleet(loaded: Loaded) -> Iterator[tuple[Settings, FleetInfo, CoordinatorHandle]]:
    """A running fleet for a further gateway: the fleet's settings with this gateway's own, what it is made of, its coordinator.

    After the block, one more signal ends the process.
    """
    from backend.launch.finding import found_fleet
    from backend.launch.fleet import prepare_process

    with signals() as forced, found_fleet(loaded, None) as (coordinator, _):
        prepare_process()
        info = coordinator.info()
        theirs = type(loaded.settings).model_validate_json(info.settings_json)
        try:
            yield theirs.model_copy(update={"gateway": loaded.settings.gateway}), info, coordinator
        finally:
            forced.armed = True


@contextmanager
def further_processes(settings: Settings, arguments: list[str]) -> Iterator[Peers]:
    """The processes that the settings ask for, with a folder for their sockets."""
    from backend.config.runtime import home
    from backend.launch.fleet import cluster_address
    from gateway.peers import Peers

    count = settings.gateway.processes
    if count == 1:
        yield Peers()
        return
    # The folder is private to this user.
    with tempfile.TemporaryDirectory(prefix="g-", dir=home()) as folder:

        def command(number: int, port: int) -> list[str]:
            address, namespace = cluster_address()
            # It drains when this process has ended.
            own = [sys.executable, "-m", "outrider.child", str(os.getpid()), GATEWAY_PROCESS, folder, str(number), str(port)]
            return [*own, *arguments, "--ray-address", address, "--ray-namespace", namespace]

        yield Peers(Path(folder), 0, count, command=command)


def gateway_process(arguments: list[str]) -> None:
    """Runs one more process on a gateway's port.

    Arguments: `FOLDER NUMBER PORT`, then those of the first process, and where the fleet is.
    """
    folder, number, port, *rest = arguments
    loaded = sources.load(rest, GATEWAY_PROCESS)
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    with joined_fleet(loaded) as (settings, info, coordinator):
        from gateway.peers import Peers

        peers = Peers(Path(folder), int(number), settings.gateway.processes, port=int(port))
        run_gateway(settings, info, coordinator, None, rest, peers)
