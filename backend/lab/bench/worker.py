"""A child process of a benchmark: a verifier or a drafter, on cores of its own (`children.py`)."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backend.lab.bench.pacing import Pacer, pace_drafter, pace_verifier

Job = dict[str, Any]
FRESH_POLL_S = 0.01
PACED = "paced"
"""The message that asks for the counters of a paced process."""


def main(job: Job, pipe: Connection, log: Path) -> None:
    """Serves.  Sends its address when it is ready, then answers each message, until the pipe closes."""
    # Ctrl-C reaches only the parent, which then ends its children in order.
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level="INFO")
    roles: dict[str, Callable[[Job, Connection], None]] = {"verifier": _verifier, "drafter": _drafter}
    os.sched_setaffinity(0, job["cores"])
    roles[job["role"]](job, pipe)


def _verifier(job: Job, pipe: Connection) -> None:
    from backend.config import Settings
    from backend.verifier.process import VerifierProcess

    pacer = pace_verifier(job["pace"]) if job.get("pace") else None
    settings = Settings.model_validate(job["settings"])
    process = VerifierProcess(job["name"], "bench", settings, job["paths"], job["address"])
    _serve(process, pipe, pacer, process.set_drafters)


def _drafter(job: Job, pipe: Connection) -> None:
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess

    pacer = pace_drafter(job["pace"]) if job.get("pace") else None
    model = DrafterModel(job["target_dir"], job["head_dir"], job["head_dir"], job.get("learning_dir"))
    process = DrafterProcess(job["name"], model, DraftingSettings.model_validate(job["settings"]), job["address"])

    def answer(message: Any) -> Any:
        stale = process.stats()
        # The loop publishes a new object a few times a second.  A new object contains everything counted before this request.
        while process.is_alive and process.stats() is stale:
            threading.Event().wait(FRESH_POLL_S)
        return process.stats()

    _serve(process, pipe, pacer, answer)


def _serve(process: Any, pipe: Connection, pacer: Pacer | None, answer: Callable[[Any], Any]) -> None:
    """Answers `PACED` with the pacer's counters, any other message with `answer(message)`."""
    process.start()
    pipe.send(process.address)
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.recv()
            pipe.send(pacer.counts if pacer is not None and message == PACED else answer(message))
    process.stop()
