"""SIGTERM for a member's process: it takes no new work, its requests move elsewhere, then the process ends.

Python runs the handler on the main thread, in an actor Ray's, which checks for signals a hundred times a second.  A thread of
its own drains.  Ray considers the end a failure and restarts the actor where the cluster has room.  SIGKILL, and Ray's other
ways to end a worker, leave no time; then the gateways fail over.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from backend.member.membership import Membership

logger = logging.getLogger(__name__)

POLL_S = 0.1
SETTLED_S = 1.5
"""Seconds without work after which a member ends.  Gateways ask for the fleet twice a second, so all know of the drain then."""


class Departure:
    """`is_idle()`: whether the member has no work; `stop()` ends its serving.  Both are called on another thread.

    After `limit_s` seconds the member ends even if it has work.
    """

    def __init__(self, membership: Membership, is_idle: Callable[[], bool], stop: Callable[[], None], limit_s: float) -> None:
        self._membership = membership
        self._is_idle = is_idle
        self._stop = stop
        self._limit_s = limit_s
        self._exit: Callable[[int], Any] = os._exit
        self._began = threading.Event()

    def on_sigterm(self) -> None:
        """Installs the handler, which only the main thread may do; on another one this logs a warning."""
        try:
            signal.signal(signal.SIGTERM, lambda number, frame: self.begin())
        except ValueError:
            logger.warning("SIGTERM will end this process without a drain: it does not run on its main thread")

    def begin(self) -> None:
        """Begins the departure; further calls have no effect."""
        if not self._began.is_set():
            self._began.set()
            threading.Thread(target=self._leave, name="departure", daemon=True).start()

    def _leave(self) -> None:
        logger.info("told to end: draining")
        self._membership.retire()
        deadline = time.monotonic() + self._limit_s
        idle_since = time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - idle_since < SETTLED_S:
            time.sleep(POLL_S)
            if not self._is_idle():
                idle_since = time.monotonic()
        self._stop()
        self._exit(0)
