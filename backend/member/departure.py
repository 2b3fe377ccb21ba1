"""SIGTERM for a member's process: it takes no new work, its requests go elsewhere, then it ends.

Python runs the handler on the main thread, which in an actor is Ray's and looks for signals a hundred times a second; a thread
of its own does the rest.  Ray takes the end for a failure and starts the actor again where the cluster still has room for it.
SIGKILL, and what else Ray ends its workers with, leaves no time: then the gateways fail over.
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
"""Gateways ask for the fleet twice a second: whoever has had no work for so long after that gets none any more."""


class Departure:
    """`is_idle()` says whether the member has nothing to do, `stop()` ends its serving; both are called on another thread."""

    def __init__(self, membership: Membership, is_idle: Callable[[], bool], stop: Callable[[], None], limit_s: float) -> None:
        self._membership = membership
        self._is_idle = is_idle
        self._stop = stop
        self._limit_s = limit_s
        self._exit: Callable[[int], Any] = os._exit
        self._began = threading.Event()

    def on_sigterm(self) -> None:
        """From now on SIGTERM has this effect.  Only the main thread can say so; on another one it stays as it was."""
        try:
            signal.signal(signal.SIGTERM, lambda number, frame: self.begin())
        except ValueError:
            logger.warning("SIGTERM will end this process without a drain: it does not run on its main thread")

    def begin(self) -> None:
        """Leaves, once."""
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
