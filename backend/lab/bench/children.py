"""Starts, queries and ends a benchmark's child processes.  Parent process, its one thread.

A child's only argument describes its role, and it answers JSON lines (`worker.py`).  It ends when its standard input closes, so
that no child outlives a parent that was killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
LAST_LINES = 15


class ChildError(Exception):
    """A child ended unexpectedly or did not start; the message holds the end of its log."""


class Child:
    """One child process.  The constructor starts it and does not wait; call `wait_ready` before use."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self.name = str(job.get("name", job["role"]))
        self._log_path = log
        self._log: IO[bytes] = log.open("wb")
        self._ready = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "backend.lab.bench.worker", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Ctrl-C reaches only the parent, which then ends its children in order.
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        """Waits until the process serves; returns its address.  Raises `ChildError`."""
        overdue = threading.Timer(START_TIMEOUT_S, self.process.kill)
        overdue.start()
        try:
            address = str(self._answer()["address"])
        finally:
            overdue.cancel()
        self._ready = True
        return address

    def ask(self, message: Any) -> Any:
        """Sends one JSON line and returns the answer to it.  Raises `ChildError`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Other lines are printed by libraries.
            if line.startswith("{"):
                return json.loads(line)
        raise self._died()

    def check(self) -> None:
        """Raises `ChildError` when the process has ended."""
        if self.process.poll() is not None:
            raise self._died()

    def hang_up(self) -> None:
        """Closes the child's standard input, which ends it; kills a child that is still loading."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it had already ended
        if not self._ready:
            self.process.kill()

    def close(self) -> None:
        """Waits for the child's end, and kills it after `STOP_TIMEOUT_S`."""
        self.hang_up()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()

    def _died(self) -> ChildError:
        lines = self._log_path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return ChildError("\n".join([f"{self.name} ended unexpectedly; its last words:", *lines]))


def close_all(children: Sequence[Child]) -> None:
    """Ends all of them at once, then waits for each."""
    for child in children:
        child.hang_up()
    for child in children:
        child.close()
