"""What the tensor-parallel ranks of a verifier leave behind when one of them dies.  Verifier's process, any thread.

On CPUs vLLM's ranks reduce through segments of shared memory, which each removes as it ends; one that is killed does not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

SEGMENTS = Path("/dev/shm")
NAME = "vllm_dist_"


def segments_of_ranks(executor: Any) -> set[Path]:
    """The segments that the processes of vLLM's executor have mapped; none where the executor has no processes."""
    found = set()
    for worker in getattr(executor, "workers", ()):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{worker.proc.pid}/maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SEGMENTS and path.name.startswith(NAME):
                    found.add(path)
    return found
