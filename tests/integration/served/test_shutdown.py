"""The fleet of this package is found, ends on a signal and leaves nothing behind.  In alphabetical order these are the last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet_process import ROOT, ServedFleet
from tests.support.process_tree import descendants, leftovers, shared_memory, wait_gone

pytestmark = pytest.mark.engine


def test_status_shows_it(fleet: ServedFleet) -> None:
    command = [sys.executable, "-m", "gateway.cli", "status", "--json"]
    snapshot = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert {each["member"]["kind"]: each["member"]["state"] for each in snapshot["members"]} == {
        "verifier": "ready",
        "drafter": "ready",
        "gateway": "ready",
    }
    assert [(each["verifier_id"], each["drafter_id"]) for each in snapshot["assignments"]] == [("verifier-0", "drafter-0")]


def test_it_ends_and_leaves_nothing(fleet: ServedFleet, home: Path) -> None:
    family = descendants(fleet.process.pid)
    assert len(family) > 5
    shared = set().union(*(shared_memory(pid) for pid in family))
    assert shared, "Ray's object store, at least"
    assert leftovers(home) != []
    os.killpg(fleet.process.pid, signal.SIGINT)  # as a terminal does
    assert fleet.process.wait(timeout=120) == 0
    wait_gone(family)
    assert leftovers(home) == []
    assert [path for path in shared if Path(path).exists()] == []
