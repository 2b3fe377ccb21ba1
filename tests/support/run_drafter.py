"""What a test's drafter does, in a process of its own.  Tests only."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any


def main(job: dict[str, Any], pipe: Connection) -> None:
    """Runs one `DrafterProcess` until its input ends.  A message is a head to put in place, or empty; `Learning` answers it."""
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess

    paths = job["paths"]
    model = DrafterModel(paths.target_dir, job["own"] or paths.drafter_dir, paths.drafter_dir, paths.learning_dir)
    drafter = DrafterProcess("drafter-0", model, DraftingSettings.model_validate(job["settings"]), job["address"])
    drafter.start()
    pipe.send(drafter.address)
    try:
        while True:
            head_dir = pipe.recv()
            if head_dir:
                assert drafter._learner is not None
                assert drafter._learner._exchange(head_dir)
            pipe.send(drafter.stats().learning)
    except EOFError:
        drafter.stop()
