"""`outrider serve` as a process: it comes up, is found, ends on a signal and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

START_S = 200.0


@pytest.fixture
def home() -> Iterator[Path]:
    """A short temporary directory: Ray's sockets live below it."""
    directory = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def outrider(home: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home)}
    return subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern!r} never came:\n{''.join(seen)}")


def group_members(pgid_or_root: int) -> list[int]:
    """Live descendants of a process, whatever their process group."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found, frontier = [], {pgid_or_root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def shared_memory(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped."""
    try:
        return set(re.findall(r" (/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_gone(pids: list[int], timeout_s: float = 20.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive(pids)


def leftovers(home: Path) -> list[str]:
    """Files of fleets that should be gone; the user's token stays, and so do caches of torch."""
    return [p.name for p in (*home.glob("or-ray-*"), *home.glob("outrider/*")) if p.name != "ray-token"]


def test_serve_comes_up_is_found_and_leaves_nothing(home: Path) -> None:
    process = outrider(home, "serve", "--port", "0", "--drafter", "ngram")
    try:
        url = read_until(process, r"serving at (http://\S+)/v1")[1]
        assert httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"] == "demo"
        asked = {"model": "demo", "prompt": "pass\n", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=30, trust_env=False).status_code == 200
        status = outrider(home, "status", "--json")
        snapshot = json.loads(status.communicate(timeout=60)[0])
        assert {m["member"]["kind"]: m["member"]["state"] for m in snapshot["members"]} == {
            "verifier": "ready",
            "drafter": "ready",
            "gateway": "ready",
        }
        assert [(a["verifier_id"], a["drafter_id"]) for a in snapshot["assignments"]] == [("verifier-0", "drafter-0")]
        family = group_members(process.pid)
        assert len(family) > 5
        shared = set().union(*(shared_memory(pid) for pid in family))
        assert shared, "Ray's object store, at least"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=60) == 0
        assert wait_gone(family) == []
        assert leftovers(home) == []
        assert [path for path in shared if Path(path).exists()] == []
    finally:
        process.kill()


def test_a_killed_fleet_ends_and_the_next_command_cleans_up(home: Path) -> None:
    process = outrider(home, "serve", "--port", "0", "--mode", "off")
    try:
        read_until(process, r"Ray up")
        read_until(process, r"verifier-0: process up")
        # Ray's agents look for their parent once a minute; everything else ends with it.
        family = [pid for pid in group_members(process.pid) if "Agent" not in command_line(pid)]
        process.kill()
        process.wait()
        assert wait_gone(family, 60) == []
        assert any(home.glob("or-ray-*"))
        status = outrider(home, "status")
        assert "no fleet" in status.communicate(timeout=60)[0]
        assert not any(home.glob("or-ray-*"))
    finally:
        process.kill()


def test_an_engine_that_cannot_start_is_one_line_and_exit_1(home: Path) -> None:
    process = outrider(home, "serve", "--port", "0", "--mode", "off", "--verifier-max-model-len", "1000000")
    try:
        output = process.communicate(timeout=START_S)[0]
    finally:
        process.kill()
    assert process.returncode == 1
    assert len(re.findall(r"^outrider: verifier-0 failed to start: .*max_model_len.*$", output, re.MULTILINE)) == 1
    assert "Traceback" not in output
    assert leftovers(home) == []


def test_a_signal_while_starting_ends_everything(home: Path) -> None:
    process = outrider(home, "serve", "--port", "0", "--mode", "off")
    try:
        read_until(process, r"CPU cores")
        family = group_members(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
        assert wait_gone(family) == []
    finally:
        process.kill()
