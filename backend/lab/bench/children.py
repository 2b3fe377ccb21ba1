"""Child processes of a benchmark, each a verifier or a drafter on cores of its own: how they start, answer and end.

A child answers messages over a pipe, and ends when the pipe closes, so that no child outlives a parent that was killed.
`Child` belongs to the parent process, its one thread; the functions run in the child.
"""

import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backend.config import environment
from backend.lab.bench.pace import Pace
from backend.lab.bench.pacing import Pacer, pace_drafter
from backend.models.resolve import ResolvedModels

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
LAST_LINES = 15
FRESH_POLL_S = 0.01
_SPAWN = multiprocessing.get_context("spawn")

Served = tuple[Any, Callable[[Any], Any]]
"""A verifier's or drafter's process object, and what answers messages."""


class ChildError(Exception):
    """A child ended unexpectedly or did not start; the message holds the end of its log."""


class Child:
    """One child process.  The constructor starts it and waits until it serves.  Raises `ChildError`."""

    def __init__(
        self, name: str, build: Callable[[], Served], cores: Sequence[int], log: Path, variables: Mapping[str, str]
    ) -> None:
        """`build` makes in the child what it serves."""
        self._name, self._log = name, log
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_main, args=(build, cores, theirs, log))
        # The child must have them before it imports anything.  They mean nothing to this process, which computes nothing.
        environment.export({"OMP_NUM_THREADS": str(len(cores)), **variables})
        self.process.start()
        theirs.close()
        try:
            if not self._pipe.poll(START_TIMEOUT_S):
                self.process.kill()
            self.address = str(self._answer())
        except BaseException:
            self.process.kill()
            raise

    def ask(self, message: Any = None) -> Any:
        """Sends a message and returns the answer to it.  Raises `ChildError`."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._died() from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def check(self) -> None:
        """Raises `ChildError` when the process has ended."""
        if not self.process.is_alive():
            raise self._died()

    def close(self) -> None:
        """Closes the pipe, which ends the child; kills it after `STOP_TIMEOUT_S`."""
        self._pipe.close()
        try:
            self.process.join(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.join()

    def _died(self) -> ChildError:
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:] if self._log.exists() else []
        return ChildError("\n".join([f"{self._name} ended unexpectedly; its last words:", *lines]))


def _main(build: Callable[[], Served], cores: Sequence[int], pipe: Connection, log: Path) -> None:
    """Serves.  Sends its address when it is ready, then answers each message, until the pipe closes."""
    # Ctrl-C reaches only the parent, which then ends its children in order.
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level="INFO")
    os.sched_setaffinity(0, cores)
    process, answer = build()
    process.start()
    pipe.send(process.address)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(answer(pipe.recv()))
    process.stop()


def build_verifier(name: str, settings: Mapping[str, Any], models: ResolvedModels, pace: Pace | None, address: str) -> Served:
    """A verifier.  A list of drafters is its new assignment; the answer to any message are the counters of a paced run."""
    from backend.config import Settings
    from backend.verifier.process import VerifierProcess

    pacer: Pacer | None = None
    if pace:
        from backend.lab.bench.paced_worker import pace_verifier

        pacer = pace_verifier(pace)
    process = VerifierProcess(name, "bench", Settings.model_validate(settings), models, address)

    def answer(refs: Any) -> Any:
        if refs is not None:
            process.set_drafters(refs)
        return pacer.counts if pacer else None

    return process, answer


def build_drafter(
    name: str, cores: int, models: ResolvedModels, head_dir: str | None, pace: Pace | None, address: str
) -> Served:
    """A drafter.  It answers with its counters, and those of a paced run."""
    from backend.config import DraftingSettings
    from backend.drafter.process import DrafterModel, DrafterProcess

    pacer = pace_drafter(pace) if pace else None
    model = DrafterModel(models.target_dir, head_dir, head_dir, models.learning_dir)
    process = DrafterProcess(name, model, DraftingSettings(cores=cores), address)

    def answer(_: Any) -> Any:
        stale = process.stats()
        # The loop publishes a new object a few times a second.  A new object contains everything counted before this request.
        while process.is_alive and process.stats() is stale:
            time.sleep(FRESH_POLL_S)
        return process.stats(), pacer.counts if pacer else None

    return process, answer
