"""SIGTERM for a member's process: it takes no new work, its requests move elsewhere, then the process ends.

Python runs the handler on the main thread, in an actor Ray's, which checks for signals a hundred times a second.  A thread of
its own drains.  Ray considers the end a failure and restarts the actor where the cluster has room.  SIGKILL, and Ray's other
ways to end a worker, leave no time; then the gateways fail over.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from backend.member.membership import Membership

logger = logging.getLogger(__name__)

POLL_S = 0.1
SETTLED_S = 1.5
"""Seconds without work after which a member ends.  Gateways ask for the fleet twice a second, so all know of the drain then."""


def depart_on_sigterm(
    membership: Membership,
    is_idle: Callable[[], bool],
    stop: Callable[[], None],
    limit_s: float,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Installs the handler, which only the main thread may do; on another one this logs a warning.

    `is_idle()`: whether the member has no work; `stop()` ends its serving.  Both are called on another thread.  After `limit_s`
    seconds the member ends even if it has work.
    """

    def leave() -> None:
        logger.info("told to end: draining")
        membership.retire()
        deadline = time.monotonic() + limit_s
        idle_since = time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - idle_since < SETTLED_S:
            time.sleep(POLL_S)
            if not is_idle():
                idle_since = time.monotonic()
        stop()
        end(0)

    leaving = threading.Thread(target=leave, name="departure", daemon=True)

    def begin(number: int, frame: object) -> None:
        if leaving.ident is None:
            leaving.start()

    try:
        signal.signal(signal.SIGTERM, begin)
    except ValueError:
        logger.warning("SIGTERM will end this process without a drain: it does not run on its main thread")
