"""What a fleet holds of the machine and may leave there: processes, sockets, shared memory.  Tests only."""

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
        return " ".join(psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def wait_gone(pids: Iterable[int]) -> None:
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="the end of all processes")


ACTORS = ("CoordinatorActor", "Drafter", "Verifier")


def actors(root: int) -> dict[str, list[int]]:
    """The processes of each of our actor classes below a process."""
    names = {pid: name_of(pid) for pid in descendants(root)}
    # While it runs a method the title names that, too.
    return {actor: [pid for pid, name in names.items() if name.startswith(f"ray::{actor}")] for actor in ACTORS}


def shared_memory(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped."""
    try:
        return {each.path for each in psutil.Process(pid).memory_maps() if each.path.startswith("/dev/shm/")}
    except psutil.Error:
        return set()


def leftovers(home: Path) -> list[str]:
    """Files of fleets that should have been removed; the user's token and torch's caches do not count."""
    return [p.name for p in (*home.glob("or-ray-*"), *home.glob("outrider/*")) if p.name != "ray-token"]
