"""The Ray cluster under a fleet: a local one of our own, or a running one we join.  The launcher's process, main thread.

A local cluster listens on 127.0.0.1 at ports the system chose, admits only who has this user's token, keeps its files in a
private directory that goes away with it, and reports nothing to anyone; so several fleets live side by side on one host.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from backend.config import environment
from backend.config.sources import CommandError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""No token or feature goes through Ray, so its smallest store does."""
LOCALHOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0


class ClusterError(CommandError):
    """Ray did not start or cannot be reached; the message is one line."""


@dataclass
class RayCluster:
    """A connection to Ray, and the cluster itself when it is ours."""

    address: str
    namespace: str
    temp_dir: Path | None
    """Set when the cluster is ours."""

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, address: str | None, namespace: str, env: Mapping[str, str], token: str | None = None
    ) -> Iterator[RayCluster]:
        """A cluster for the block: joined at `address`, or started here and ended with the block.

        `env` is what every actor finds in its environment; `token` as for `open`.  Raises `ClusterError`.
        """
        cluster = cls.open(address, namespace, env, token)
        try:
            yield cluster
        finally:
            cluster.close()

    @classmethod
    def open(cls, address: str | None, namespace: str, env: Mapping[str, str], token: str | None = None) -> RayCluster:
        """Joins or starts a cluster without a block: call `close`.

        `token` admits to a cluster that we started: it is required to start one, and to join one of ours.
        """
        environment.export({"RAY_USAGE_STATS_ENABLED": "0"})
        environment.export({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_raylet_start_wait_time_s": "120"}, override=False)
        if token is not None:
            _present(token)
        common: dict[str, Any] = {
            "namespace": namespace,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
            "runtime_env": {"env_vars": dict(env)},
        }
        if address is not None:
            if address.startswith(f"{LOCALHOST}:"):
                _loopback_only()
            _check_reachable(address)
            return cls(_init(address=address, **common), namespace, None)
        if token is None:
            raise ValueError("a cluster of our own needs a token")
        _loopback_only()
        # Ray starts its workers at niceness 15: whatever else runs on the machine would starve verifiers.
        environment.export({"RAY_worker_niceness": "0"}, override=False)
        # Ray opens its directory to everyone; the one around it stays ours.
        temp_dir = Path(tempfile.mkdtemp(prefix="or-ray-"))
        try:
            found = _init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(temp_dir / "ray"),
                _node_ip_address=LOCALHOST,
                **common,
            )
        except ClusterError:
            shutil.rmtree(temp_dir, ignore_errors=True)
            raise
        return cls(found, namespace, temp_dir)

    @property
    def ours(self) -> bool:
        """Whether the cluster ends with us."""
        return self.temp_dir is not None

    @property
    def gpus(self) -> float:
        """GPUs of the whole cluster."""
        return float(ray.cluster_resources().get("GPU", 0))

    @property
    def cpus(self) -> float:
        """CPUs of the whole cluster."""
        return float(ray.cluster_resources().get("CPU", 0))

    def has_room(self, cpus: float, gpus: float) -> bool:
        """Whether one more process of that size fits beside those that run."""
        free = ray.available_resources()
        return bool(cpus <= free.get("CPU", 0) and gpus <= free.get("GPU", 0))

    @property
    def node_id(self) -> str:
        """This node's name in the cluster."""
        return str(ray.get_runtime_context().get_node_id())

    def close(self) -> None:
        """Leaves the cluster; ends it and removes its files when it is ours."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.shutdown()
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def _present(token: str) -> None:
    """Makes this process and its children show `token` to Ray, which read its configuration when it was imported."""
    environment.export({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    raylet: Any = importlib.import_module("ray._raylet")
    with contextlib.suppress(AttributeError):  # older Rays have no tokens
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _loopback_only() -> None:
    """Makes Ray listen on 127.0.0.1 alone.

    On Linux it replaces a loopback address by the host's own and then listens on every interface, unless it is told that this
    platform has no clusters, as it assumes on a laptop.  Ray reads the variable when imported, its children when they start.
    """
    environment.export({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def _check_reachable(address: str) -> None:
    """Says at once what Ray would find out in minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "//" in address:
        return  # "auto" and the like: Ray's own to understand
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(f"no Ray cluster at {address}: {error.strerror or error}") from error


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray puts its own handler for SIGTERM in place; ours stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)


@_own_signal_handlers()
def _init(**arguments: Any) -> str:
    try:
        return str(ray.init(**arguments).address_info["gcs_address"])
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        where = arguments["address"]
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = "Ray did not start" if where == "local" else f"no Ray cluster at {where}"
        raise ClusterError(f"{what}: {reason}") from error
