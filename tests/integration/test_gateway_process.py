"""A gateway in a process of its own."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support import run_gateway
from tests.support.processes import Child
from tests.support.running_gateway import MODEL_DIR

pytestmark = pytest.mark.engine


def test_a_signal_ends_a_process_cleanly(tmp_path: Path) -> None:
    """Another one, Ctrl-C's, ends the fleet of `tests/integration/served`."""
    gateway = Child(run_gateway.main, {"model": MODEL_DIR}, tmp_path)
    try:
        assert httpx.get(f"{gateway.address}/livez").status_code == 200
        os.kill(gateway.pid, signal.SIGTERM)
        gateway.process.join(30)
        assert gateway.process.exitcode == 0
    finally:
        gateway.close()
