"""The Ray cluster under a fleet: a local one of our own, or a running one we join.  The launcher's process, main thread.

A local cluster listens on 127.0.0.1 at ports that the system chose, and admits only processes with this user's token.  Its
files are in a private directory that is removed with it.  It sends no usage statistics.  So several fleets can run on one host.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from backend.config import environment
from backend.config.sources import CommandError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest object store is enough, because no token or feature goes through Ray."""
LOCALHOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0


class ClusterError(CommandError):
    """Ray did not start or cannot be reached; the message is one line."""


@dataclass
class RayCluster:
    """A connection to a Ray cluster, and the cluster itself if we started it."""

    address: str
    namespace: str
    temp_dir: Path | None
    """The cluster's private directory; None when we joined a cluster of others."""

    @classmethod
    def open(cls, address: str | None, namespace: str, env: Mapping[str, str], token: str | None = None) -> RayCluster:
        """Joins the cluster at `address`, or starts one; the caller must call `close`.  Raises `ClusterError`.

        `env` goes to the environment of every actor.  `token` is the secret of clusters that we start.  It is required to start
        one, and to join one that we started.
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
        # Ray starts its workers at niceness 15: whatever else runs on the machine would starve verifiers.  It also starts a
        # worker per core that no actor could use, because actors have environments of their own.
        environment.export({"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}, override=False)
        # Ray makes its own directory readable for everyone; the directory around it stays private.
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
        """Whether we started the cluster, and so end it."""
        return self.temp_dir is not None

    @property
    def gpus(self) -> float:
        return float(ray.cluster_resources().get("GPU", 0))

    @property
    def cpus(self) -> float:
        return float(ray.cluster_resources().get("CPU", 0))

    @property
    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def keep_logs(self) -> Path | None:
        """Copies the logs of our own cluster's processes to where they outlive it; None if that is not possible."""
        if self.temp_dir is None:
            return None
        kept = environment.state_dir() / "failed-start"
        shutil.rmtree(kept, ignore_errors=True)
        try:
            shutil.copytree(self.temp_dir / "ray" / "session_latest" / "logs", kept)
        except (OSError, shutil.Error):
            return None
        return kept

    def close(self) -> None:
        """Leaves the cluster; if we started it, ends it and removes its files."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.shutdown()
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def _present(token: str) -> None:
    """Makes this process and its children authenticate to Ray with `token`.

    Ray read its configuration when it was imported, so the loaded configuration is refreshed too.
    """
    environment.export({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    raylet: Any = importlib.import_module("ray._raylet")
    with contextlib.suppress(AttributeError):  # older Rays have no tokens
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _loopback_only() -> None:
    """Makes Ray listen on 127.0.0.1 alone.

    On Linux, Ray replaces a loopback address by the host's own and then listens on every interface.  It does not where it
    assumes that clusters are not supported, as on macOS.  Ray reads the variable when it is imported, hence the assignment;
    its child processes read the variable when they start.
    """
    environment.export({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def _check_reachable(address: str) -> None:
    """Raises `ClusterError` in seconds if no cluster answers; Ray would take minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "//" in address:
        return  # "auto" and other forms that only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(f"no Ray cluster at {address}: {error.strerror or error}") from error


def _init(**arguments: Any) -> str:
    ours = signal.getsignal(signal.SIGTERM)
    try:
        return str(ray.init(**arguments).address_info["gcs_address"])
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        where = arguments["address"]
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = "Ray did not start" if where == "local" else f"no Ray cluster at {where}"
        raise ClusterError(f"{what}: {reason}") from error
    finally:
        # Ray installs a handler of its own, but only on the main thread: elsewhere this is a `ValueError`.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, ours)
