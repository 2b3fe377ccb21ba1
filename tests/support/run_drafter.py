"""What a test's drafter does, in a process of its own.  Tests only."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any


def main(job: dict[str, Any], pipe: Connection) -> None:
    """Runs one `DrafterProcess` until its input ends."""
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess

    model = DrafterModel(job["paths"].target_dir, job["own"] or job["paths"].drafter_dir, job["paths"].drafter_dir)
    drafter = DrafterProcess("drafter-0", model, DraftingSettings.model_validate(job["settings"]), job["address"])
    drafter.start()
    pipe.send(drafter.address)
    pipe.poll(None)
    drafter.stop()
