"""What a fleet holds of the machine: processes, sockets, shared memory.  Reads /proc and /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.process_tree import descendants


def name_of(pid: int) -> str:
    """A process's command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


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


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def unix_sockets() -> set[str]:
    """Paths that unix sockets of this machine are bound to."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {fields[7] for line in lines if len(fields := line.split()) > 7}
