"""The drafter's loop: receive messages, draft, answer.  Runs on the drafting thread, which owns the socket and the proposer.

`stop`, `replace` and `stats` may be called from any thread.
"""

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from backend.drafter.proposer import Proposer
from backend.drafter.service import DrafterService, Reply
from backend.fleet import DrafterStats
from backend.transport.hub import Hub, ServerSocket

logger = logging.getLogger(__name__)

POLL_S = 0.5
SWEEP_EVERY_S = 1.0
PUBLISH_EVERY_S = 0.1
MAX_DRAIN = 256
"""Messages received before the next batch at most, so that answers do not wait for a flood to end."""


class DrafterLoop:
    """Moves messages between a bound socket and the service until told to stop."""

    def __init__(self, hub: Hub, router: ServerSocket, service: DrafterService) -> None:
        self._hub = hub
        self._router = router
        self._service = service
        self._stopping = False
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._published = service.stats()
        self._next_sweep = 0.0
        self._next_publish = 0.0

    def run(self) -> None:
        """Serves until `stop`.  An exception here is a bug or a broken device: it ends the thread."""
        while not self._stopping:
            if not self._service.has_work:
                self._hub.poll(POLL_S)
            while not self._orders.empty():
                self._orders.get_nowait()()
            self._send(self._receive())
            self._send(self._service.work() if self._service.has_work else [])
            self._house_keep(time.monotonic())

    def stop(self) -> None:
        """Ends `run` after the present batch."""
        self._stopping = True
        self._hub.wake()

    def replace(self, proposer: Proposer, timeout_s: float, retargeted: bool = False) -> None:
        """Exchanges the proposer between two batches; `retargeted` as in `DrafterService.replace`.

        Raises `TimeoutError` when that does not happen in time; it does not happen later either.
        """
        done: Future[None] = Future()

        def exchange() -> None:
            if done.set_running_or_notify_cancel():
                self._send(self._service.replace(proposer, retargeted))
                done.set_result(None)

        self._orders.put(exchange)
        self._hub.wake()
        wait([done], timeout_s)
        if done.cancel():
            raise TimeoutError("the drafting thread does not come round")
        done.result()

    def stats(self) -> DrafterStats:
        """The counters as last published."""
        return self._published

    def _receive(self) -> list[Reply]:
        replies: list[Reply] = []
        for _ in range(MAX_DRAIN):
            received = self._router.receive()
            if received is None:
                break
            replies += self._service.receive(*received)
        return replies

    def _send(self, replies: list[Reply]) -> None:
        for identity, payload in replies:
            if not self._router.send(identity, payload):
                logger.warning("a verifier does not take its drafts; one answer dropped")

    def _house_keep(self, now: float) -> None:
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_EVERY_S
            self._service.sweep()
        if now >= self._next_publish:
            self._next_publish = now + PUBLISH_EVERY_S
            stats = self._service.stats()
            stats.connections_refused = self._router.connections_refused()
            self._published = stats
