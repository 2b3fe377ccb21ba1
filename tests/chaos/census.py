"""What a fleet holds of the machine: processes, sockets, shared memory.  Reads /proc and /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.fleet_process import descendants


def name_of(pid: int) -> str:
    """A process's command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def actors(root: int) -> list[str]:
    """The Ray actors below a process, by class, each as often as it runs."""
    names = [name for pid in descendants(root) if (name := name_of(pid)).startswith("ray::") and "IDLE" not in name]
    # While it runs a method the title names that, too.
    return sorted(name.removeprefix("ray::").split(".")[0].split(":")[0] for name in names)


def pid_of_actor(root: int, actor: str) -> int | None:
    """The process of an actor class below `root`."""
    for pid in sorted(descendants(root)):
        name = name_of(pid)
        if name.startswith("ray::") and actor in name:
            return pid
    return None


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
