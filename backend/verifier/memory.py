"""How much more memory this process's machine, or container, can give.  Any thread."""

from __future__ import annotations

import contextlib
from pathlib import Path

MIB = 2**20


def available_memory_mib(root: Path = Path("/")) -> int:
    """What the kernel calls available, within the limit of the control group (version 2) where there is one."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = root / "sys/fs/cgroup"
    # "max" is no number: no limit.
    with contextlib.suppress(OSError, ValueError):
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        cached = next(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file "))
        available = min(available, limit - used + cached)
    return max(available, 0) // MIB


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
