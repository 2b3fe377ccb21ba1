"""Starts, queries and ends a benchmark's child processes.  Parent process, its one thread.

A child is told its role, and answers messages over a pipe (`worker.py`).  It ends when the pipe closes, so that no child
outlives a parent that was killed.
"""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.config import environment
from backend.lab.bench import worker

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
LAST_LINES = 15
_SPAWN = multiprocessing.get_context("spawn")


class ChildError(Exception):
    """A child ended unexpectedly or did not start; the message holds the end of its log."""


class Child:
    """One child process.  The constructor starts it and does not wait; call `wait_ready` before use."""

    def __init__(self, job: worker.Job, log: Path) -> None:
        self.name = str(job.get("name", job["role"]))
        self._log = log
        self._ready = False
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=worker.main, args=(job, theirs, log))
        # The child must have them before it imports anything.  They mean nothing to this process, which computes nothing.
        environment.export({"OMP_NUM_THREADS": str(len(job["cores"]))} | job.get("environment", {}))
        self.process.start()
        theirs.close()

    def wait_ready(self) -> str:
        """Waits until the process serves; returns its address.  Raises `ChildError`."""
        if not self._pipe.poll(START_TIMEOUT_S):
            self.process.kill()
        address = str(self._answer())
        self._ready = True
        return address

    def ask(self, message: Any) -> Any:
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

    def hang_up(self) -> None:
        """Closes the pipe, which ends the child; kills a child that is still loading."""
        self._pipe.close()
        if not self._ready:
            self.process.kill()

    def close(self) -> None:
        """Waits for the child's end, and kills it after `STOP_TIMEOUT_S`."""
        self.hang_up()
        try:
            self.process.join(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.join()

    def _died(self) -> ChildError:
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:] if self._log.exists() else []
        return ChildError("\n".join([f"{self.name} ended unexpectedly; its last words:", *lines]))


def close_all(children: Sequence[Child]) -> None:
    """Ends all of them at once, then waits for each."""
    for child in children:
        child.hang_up()
    for child in children:
        child.close()
