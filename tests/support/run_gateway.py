"""The main function of a test's gateway process.  Tests only."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from backend.config import Settings
from gateway.http.server import GatewayServer
from tests.support.static_directory import StaticDirectory


def main(job: dict[str, Any], pipe: Connection) -> None:
    """Runs a gateway with the job's `members` (default: none) until a signal ends it."""
    settings = Settings.model_validate({"gateway": {"port": 0, **job.get("gateway", {})}})
    directory = StaticDirectory(job.get("members", ()))
    GatewayServer(settings, directory, job["model"], on_listening=pipe.send).run()
