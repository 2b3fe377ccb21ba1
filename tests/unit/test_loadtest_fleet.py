"""A fleet under test: nothing is killed that this did not start, and one that does not start says why."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.served import FleetError, OwnFleet, descendants


def gateway_with(*pids: int) -> Any:
    return SimpleNamespace(drafters=lambda: {pid: f"drafter-{pid}" for pid in pids})


def test_only_our_own_drafters_are_killed() -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    ours = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    fleet = object.__new__(OwnFleet)
    fleet.process = ours  # type: ignore[assignment]
    try:
        deadline = time.monotonic() + 10
        while not (children := descendants(ours.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(FleetError, match="no drafter of this fleet"):
            fleet.kill_a_drafter(gateway_with(stranger.pid))
        assert stranger.poll() is None
        (child,) = children
        assert fleet.kill_a_drafter(gateway_with(stranger.pid, child)) == f"drafter-{child} (pid {child})"
        assert ours.wait(10) is not None, "its only child is gone, so it has nothing left to wait for"
        assert stranger.poll() is None
    finally:
        for process in (stranger, ours):
            process.kill()
            process.wait()


def test_a_fleet_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    fleet = OwnFleet(["--mode", "off"], tmp_path / "serve.log")
    with pytest.raises(FleetError, match=r"did not start:\n  -m gateway.cli serve --port 0 --mode off"):
        fleet.wait_ready()
    fleet.stop()
