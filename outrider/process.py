"""A fleet as a child process.  The caller's process, and a thread that reads what the child prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque

from outrider.types import OutriderError

SHOWN_LINES = 40


class FleetProcess:
    """`outrider serve` on a free loopback port, in a session of its own.  No signal handler, no Ray in the caller's process."""

    def __init__(self, settings: dict[str, object], start_timeout_s: float) -> None:
        """Raises `OutriderError` with the end of the log when the fleet does not start."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]
        self.url = ""
        self.log: deque[str] = deque(maxlen=1000)
        self._known = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--port=0", *flags],
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._known.wait(start_timeout_s)
        except BaseException:
            self.stop()
            raise
        if not self.url:
            self.stop()
            raise OutriderError(0, "fleet_not_started", "the fleet did not start:\n" + "".join(list(self.log)[-SHOWN_LINES:]))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if found := re.search(r"serving at (https?://\S+?)/v1", line):
                self.url = found.group(1)
                self._known.set()
        self._known.set()

    def stop(self, timeout_s: float = 60.0) -> None:
        """As with Ctrl-C; a fleet that does not end in time is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=5)
