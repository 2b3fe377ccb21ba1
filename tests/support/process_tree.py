"""Finds the processes and files of a fleet, and checks that none are left.  Tests only."""

from __future__ import annotations

import re
import time
from pathlib import Path


def group_members(pgid_or_root: int) -> list[int]:
    """Live descendants of a process, in any process group."""
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
    """Files of fleets that should have been removed; the user's token and torch's caches do not count."""
    return [p.name for p in (*home.glob("or-ray-*"), *home.glob("outrider/*")) if p.name != "ray-token"]
