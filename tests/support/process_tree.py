"""What a fleet holds of the machine and may leave there: processes, sockets, shared memory.  Tests only."""

import os
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


def name_of(pid: int) -> str:
    """A process's command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def wait_gone(pids: Iterable[int], timeout_s: float = 120.0) -> None:
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s, "the end of all processes")


ACTORS = ("CoordinatorActor", "Drafter", "Verifier")


def actors(root: int) -> dict[str, list[int]]:
    """The processes of each of our actor classes below a process."""
    names = {pid: name_of(pid) for pid in descendants(root)}
    # While it runs a method the title names that, too.
    return {actor: [pid for pid, name in names.items() if name.startswith(f"ray::{actor}")] for actor in ACTORS}


def open_sockets(pid: int) -> int:
    """Sockets that a process holds open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except OSError:
            continue
    return count


def unix_sockets() -> set[str]:
    """Paths that unix sockets of this machine are bound to."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {fields[7] for line in lines if len(fields := line.split()) > 7}


def shared_memory(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped."""
    try:
        return set(re.findall(r" (/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def leftovers(home: Path) -> list[str]:
    """Files of fleets that should have been removed; the user's token and torch's caches do not count."""
    return [p.name for p in (*home.glob("or-ray-*"), *home.glob("outrider/*")) if p.name != "ray-token"]
