"""One child of a benchmark: a verifier, a drafter, an echo or the drafter's own measurement, on cores of its own.

    python -m backend.lab.bench.worker '{"role": "verifier", "cores": [0], "address": "ipc://...", ...}'

Prints one JSON line when ready, then answers each JSON line on stdin with one; the end of its input stops it.  Cores and thread
counts are set before anything that reads them is imported.
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

Job = dict[str, Any]
Measures = dict[str, Callable[[], Any]]
"""By what asks for them."""
FRESH_POLL_S = 0.01
LAPS = "laps"
"""What asks for a stopwatch's notes."""
PACED = "paced"
"""What asks for the passes of a paced process so far."""
RECORDS = "records"
"""What switches records on or off."""


def main() -> None:
    """Runs the role the first argument describes."""
    logging.basicConfig(level="INFO")
    job: Job = json.loads(sys.argv[1])
    roles: dict[str, Callable[[Job], None]] = {"verifier": _verifier, "drafter": _drafter, "echo": _echo, "micro": _micro}
    os.sched_setaffinity(0, job["cores"])
    environment.export({"OMP_NUM_THREADS": str(len(job["cores"]))} | job.get("environment", {}))
    roles[job["role"]](job)


def _verifier(job: Job) -> None:
    from backend.config import Settings
    from backend.fleet import DrafterRef
    from backend.models.resolve import ResolvedModels
    from backend.verifier.process import VerifierProcess

    measures: Measures = {}
    if job.get("profile"):
        from backend.lab.bench.stopwatch import watch_verifier

        watch = watch_verifier()
        measures[LAPS] = lambda: {LAPS: watch.take()}
    if job.get("pace"):
        from backend.lab.bench.pacing import pace_verifier

        pacer = pace_verifier(msgspec.convert(job["pace"], Pace))
        measures[PACED] = lambda: pacer.counts
    settings = Settings.model_validate(job["settings"])
    paths = msgspec.convert(job["paths"], ResolvedModels)
    process = VerifierProcess(job["name"], "bench", settings, paths, job["address"])
    switched = None
    if job.get("switch_records"):
        from backend.lab.bench.switching import SwitchedVerifier

        process = switched = SwitchedVerifier(job["name"], "bench", settings, paths, job["address"])
    process.start()
    _say({"address": process.address})

    def answer(message: Any) -> Any:
        if switched is not None and RECORDS in message:
            return switched.switch(**message[RECORDS])
        process.set_drafters(msgspec.convert(message, list[DrafterRef]))
        return {}

    _answer_lines(measures, answer)
    process.stop()


def _drafter(job: Job) -> None:
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess, pin_cores

    pin_cores(job["cores"])
    measures: Measures = {}
    if job.get("profile"):
        from backend.lab.bench.stopwatch import watch_drafter

        watch = watch_drafter()
        measures[LAPS] = lambda: {LAPS: watch.take()}
    if job.get("pace"):
        from backend.lab.bench.pacing import pace_drafter

        pacer = pace_drafter(msgspec.convert(job["pace"], Pace))
        measures[PACED] = lambda: pacer.counts
    model = DrafterModel(job["target_dir"], job["head_dir"], job["head_dir"], job.get("learning_dir"))
    process = DrafterProcess(job["name"], model, DraftingSettings.model_validate(job["settings"]), job["address"])
    process.start()
    _say({"address": process.address})

    def answer(message: Any) -> Any:
        stale = process.stats()
        # The loop publishes a new object a few times a second; one that is new now holds all that was counted before.
        while process.is_alive and process.stats() is stale:
            threading.Event().wait(FRESH_POLL_S)
        return process.stats()

    _answer_lines(measures, answer)
    process.stop()


def _echo(job: Job) -> None:
    from backend.transport import Hub, Wire

    hub = Hub(Wire())
    router = hub.router(job["address"])
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            hub.poll(1.0)
            while (received := router.receive()) is not None:
                identity, frames = received
                # What comes behind the first frame is a question's load; its answer has none.
                router.send(identity, frames[0])

    thread = threading.Thread(target=serve, name="echo")
    thread.start()
    _say({"address": router.address})
    sys.stdin.read()
    stopping.set()
    hub.wake()
    thread.join()
    hub.close()


def _micro(job: Job) -> None:
    from backend.drafter.process import pin_cores
    from backend.lab.bench.micro import measure_drafter

    pin_cores(job["cores"])
    _say({"address": ""})
    _answer_lines({}, lambda asked: measure_drafter(job["target_dir"], job["head_dir"], **asked))


def _answer_lines(measures: Measures, answer: Callable[[Any], Any]) -> None:
    """Until the input ends: a line that is a measure's name is answered with it, any other by `answer`."""
    for line in sys.stdin:
        message = json.loads(line)
        measure = measures.get(message) if isinstance(message, str) else None
        _say(answer(message) if measure is None else measure())


def _say(message: Any) -> None:
    sys.stdout.write(json.dumps(msgspec.to_builtins(message)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
