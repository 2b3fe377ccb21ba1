"""The fleet of this package is found, loses members, ends on a signal and leaves nothing behind.

In alphabetical order these tests are the last.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.integration.served.test_operations import answer, meanwhile, operation, post
from tests.support.fleet_process import ROOT, ServedFleet, wait_for
from tests.support.process_tree import descendants, leftovers, shared_memory, wait_gone

pytestmark = pytest.mark.engine


def test_its_folder_is_ours_and_members_have_the_priority_of_whoever_started_them(fleet: ServedFleet, home: Path) -> None:
    # Ray writes what the members print to files there.
    assert {folder.stat().st_mode & 0o777 for folder in home.glob("or-ray-*")} == {0o700}
    pids = [each["pid"] for each in fleet.fleet()["verifiers"]]
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in (*pids, fleet.process.pid)} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_status_shows_it(fleet: ServedFleet) -> None:
    command = [sys.executable, "-m", "gateway.cli", "status", "--json"]
    snapshot = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert {each["member"]["kind"]: each["member"]["state"] for each in snapshot["members"]} == {
        "verifier": "ready",
        "drafter": "ready",
        "gateway": "ready",
    }
    assert [(each["verifier_id"], each["drafter_id"]) for each in snapshot["assignments"]] == [
        ("verifier-0", "drafter-0"),
        ("verifier-1", "drafter-0"),
    ]


def test_members_come_and_go_and_the_last_verifier_stays(fleet: ServedFleet) -> None:
    expected = answer(fleet)
    with meanwhile(fleet, pause_s=1.0) as texts:
        assert operation(fleet, "add", kind="drafter")["members"] == ["drafter-1"]
        status, body = post(fleet, "assign", drafter="drafter-1", verifiers=["verifier-0"])
        assert (status, body["effects"]) == (200, ["drafter-1 serves verifier-0, and stays there"])
        assert operation(fleet, "remove", member="drafter-1")["state"] == "done"
        assert operation(fleet, "remove", member="verifier-1")["state"] == "done"
        status, body = post(fleet, "remove", member="verifier-0")
        assert (status, body["error"]["code"]) == (409, "last_verifier")
    assert set(texts) == {expected}
    # The gateway hears of it with the next snapshot.
    wait_for(lambda: [drafter["id"] for drafter in fleet.fleet()["drafters"]] == ["drafter-0"], what="one drafter")
    refused = fleet.command("remove", "verifier-0")
    assert refused.returncode == 1
    assert "the last verifier" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_it_ends_and_leaves_nothing(fleet: ServedFleet, home: Path) -> None:
    family = descendants(fleet.process.pid)
    assert len(family) > 5
    shared = set().union(*(shared_memory(pid) for pid in family))
    assert shared, "Ray's object store, at least"
    assert leftovers(home) != []
    body = {"model": "demo", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        # Connections of their own, so that either gateway process has some.
        responses = (
            httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=fleet.headers, timeout=120) for _ in range(8)
        )
        streams = [stack.enter_context(each) for each in responses]
        os.killpg(fleet.process.pid, signal.SIGINT)  # as a terminal does
        assert all(each.read().endswith(b"data: [DONE]\n\n") for each in streams)
    assert fleet.process.wait(timeout=120) == 0
    wait_gone(family)
    assert leftovers(home) == []
    assert [path for path in shared if Path(path).exists()] == []
