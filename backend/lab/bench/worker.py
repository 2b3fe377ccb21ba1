"""A child process of a benchmark: a verifier or a drafter, on cores of its own.

    python -m backend.lab.bench.worker '{"role": "verifier", "cores": [0], "address": "ipc://...", ...}'

Prints one JSON line when ready, then answers each JSON line on stdin with one; it ends when stdin closes.  Cores and thread
counts are set before any module that reads them is imported.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from backend.config import environment
from backend.lab.bench.pace import Pace
from backend.lab.bench.pacing import Pacer, pace_drafter, pace_verifier

Job = dict[str, Any]
FRESH_POLL_S = 0.01
PACED = "paced"
"""The message that asks for the counters of a paced process."""


def main() -> None:
    logging.basicConfig(level="INFO")
    job: Job = json.loads(sys.argv[1])
    roles: dict[str, Callable[[Job], None]] = {"verifier": _verifier, "drafter": _drafter}
    os.sched_setaffinity(0, job["cores"])
    environment.export({"OMP_NUM_THREADS": str(len(job["cores"]))} | job.get("environment", {}))
    roles[job["role"]](job)


def _verifier(job: Job) -> None:
    from backend.config import Settings
    from backend.fleet import DrafterRef
    from backend.models.resolve import ResolvedModels
    from backend.verifier.process import VerifierProcess

    pacer = pace_verifier(msgspec.convert(job["pace"], Pace)) if job.get("pace") else None
    settings = Settings.model_validate(job["settings"])
    paths = msgspec.convert(job["paths"], ResolvedModels)
    process = VerifierProcess(job["name"], "bench", settings, paths, job["address"])
    process.start()
    _say({"address": process.address})

    def answer(message: Any) -> Any:
        process.set_drafters(msgspec.convert(message, list[DrafterRef]))
        return {}

    _answer_lines(pacer, answer)
    process.stop()


def _drafter(job: Job) -> None:
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess

    pacer = pace_drafter(msgspec.convert(job["pace"], Pace)) if job.get("pace") else None
    model = DrafterModel(job["target_dir"], job["head_dir"], job["head_dir"], job.get("learning_dir"))
    process = DrafterProcess(job["name"], model, DraftingSettings.model_validate(job["settings"]), job["address"])
    process.start()
    _say({"address": process.address})

    def answer(message: Any) -> Any:
        stale = process.stats()
        # The loop publishes a new object a few times a second.  A new object contains everything counted before this request.
        while process.is_alive and process.stats() is stale:
            threading.Event().wait(FRESH_POLL_S)
        return process.stats()

    _answer_lines(pacer, answer)
    process.stop()


def _answer_lines(pacer: Pacer | None, answer: Callable[[Any], Any]) -> None:
    """Answers lines until stdin closes: `PACED` with the pacer's counters, any other message with `answer(message)`."""
    for line in sys.stdin:
        message = json.loads(line)
        _say(pacer.counts if pacer is not None and message == PACED else answer(message))


def _say(message: Any) -> None:
    sys.stdout.write(json.dumps(msgspec.to_builtins(message)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
