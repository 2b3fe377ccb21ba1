"""What a fleet leaves on the machine.  Tests only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.support.fleet_process import wait_for


def descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def wait_gone(pids: Iterable[int], timeout_s: float = 120.0) -> None:
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s, "the end of all processes")


def shared_memory(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped."""
    try:
        return set(re.findall(r" (/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def leftovers(home: Path) -> list[str]:
    """Files of fleets that should have been removed; the user's token and torch's caches do not count."""
    return [p.name for p in (*home.glob("or-ray-*"), *home.glob("outrider/*")) if p.name != "ray-token"]
