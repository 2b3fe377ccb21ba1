"""Finds a running fleet and connects a command to it.  The command's process, main thread."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from backend.config.sources import Loaded
from backend.coordinator.actor import CoordinatorHandle
from backend.launch import state
from backend.launch.cluster import RayCluster

TIMEOUT_S = 10.0


@contextmanager
def found_fleet(loaded: Loaded, name: str | None) -> Iterator[tuple[CoordinatorHandle, RayCluster]]:
    """Connects to a running fleet for a `with` block: the fleet at `--ray-address`, or else the one on this host.

    `name` is the fleet's namespace or process id; without one, `--port` names the fleet.
    Raises `ClusterError`, `CoordinatorUnavailable`, `StateError`.
    """
    address, namespace = loaded.settings.ray.address, name or loaded.settings.ray.namespace
    own = any(fleet.owns_cluster for fleet in state.running() if fleet.ray_address == address)
    if address is None:
        wanted = name or (namespace if ("ray", "namespace") in loaded.origins else None)
        # A variable or file may say where to serve next, and not which fleet is meant.
        origin = loaded.origins.get(("gateway", "port"), "")
        fleet = state.find(wanted, loaded.settings.gateway.port if origin.startswith("--") else None)
        address, namespace, own = fleet.ray_address, fleet.namespace, fleet.owns_cluster
    with closing(RayCluster.open(address, namespace, {}, state.ray_token() if own else None)) as cluster:
        yield CoordinatorHandle.connect(namespace, TIMEOUT_S), cluster
