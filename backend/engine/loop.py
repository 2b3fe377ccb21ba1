"""The verifier's main loop.  Engine process; everything here runs on the one engine thread.

    receive   requests, aborts and drafts
    wait      with nothing to do, or for drafts worth waiting for
    step      vLLM schedules, runs and samples
    publish   outputs to the gateways; features have already left for the drafters

All time is counted, either as busy or as idle for one cause: busy + idle = wall time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine.core import EngineCore

from backend.engine.draft_links import DraftLinks
from backend.engine.gateways import GatewayPort
from backend.engine.weights import WeightControl
from backend.fleet import DrafterRef, VerifierStats
from backend.transport import Hub

if TYPE_CHECKING:
    from backend.records.writer import FileRecorder

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often counters are published and gateways' leases checked."""


class EngineLoop:
    """The loop; see the module."""

    def __init__(
        self,
        core: EngineCore,
        hub: Hub,
        gateways: GatewayPort,
        drafters: DraftLinks | None,
        weights: WeightControl,
        files: FileRecorder | None = None,
    ) -> None:
        self._weights = weights
        self._core = core
        self._scheduler: Any = core.scheduler
        self._hub = hub
        self._gateways = gateways
        self._drafters = drafters
        self._stats: VerifierStats = core.scheduler.counters.stats
        self._files = files
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._mark = time.monotonic()
        self._next_tick = 0.0
        self._stalled = False
        self.published = msgspec.msgpack.encode(self._stats)

    # -- other threads -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Makes `run` return after the current step."""
        self._stopping.set()
        self._hub.wake()

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """Has the engine thread apply a new assignment."""
        if self._drafters is not None:
            links = self._drafters
            self._orders.put(lambda: links.set_drafters(refs))
            self._hub.wake()

    # -- the engine thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Loops until `stop`."""
        self._mark = time.monotonic()
        while not self._stopping.is_set():
            self._receive()
            wait = self._wait()
            if wait is not None:
                self._idle(*wait)
            else:
                self._step()

    def _receive(self) -> None:
        while not self._orders.empty():
            self._stats.busy_s += self._lap()
            self._orders.get_nowait()()
            # A new drafter's head may have a projection that must be loaded.
            self._stats.idle_s["swap"] += self._lap()
        if swapping_s := self._gateways.receive(time.monotonic()):
            self._stats.busy_s += self._lap() - swapping_s
            self._stats.idle_s["swap"] += swapping_s
        now = time.monotonic()
        self._weights.look()
        self._ask(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)

    def _wait(self) -> tuple[str, float] | None:
        """Idle cause and seconds for which not to step; None: step now."""
        now = time.monotonic()
        if self._weights.is_paused:
            return "swap", self._next_tick - now
        if not (self._scheduler.has_requests() or self._core.batch_queue):
            return "no_work", self._next_tick - now
        if self._drafters is not None:
            until = self._scheduler.wait_until(now)
            if until is not None and until > now:
                self._scheduler.learn()
                return "awaiting_draft", max(min(until, self._next_tick) - time.monotonic(), 0.0)
        if self._stalled:
            # Requests exist but none can run: a grammar is compiling, or KV cache is on its way.
            self._stalled = False
            return "no_work", 0.001
        return None

    def _idle(self, cause: str, seconds: float) -> None:
        self._stats.busy_s += self._lap()
        self._hub.poll(max(seconds, 0.0))
        self._stats.idle_s[cause] += self._lap()
        if cause != "awaiting_draft":
            self._scheduler.rested()

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        # First, for drafters to work meanwhile.
        self._ask(time.monotonic())
        self._gateways.send_outputs(outputs)
        self._core.post_step(executed)
        ran = executed or bool(outputs)
        self._stalled = not ran and self._scheduler.has_requests()
        if outputs is not None or not executed:
            # Otherwise a step was only launched: its time is counted with its outcome.
            self._scheduler.count_step(self._lap(), ran=ran)

    def _ask(self, now: float) -> None:
        if self._drafters is not None:
            self._drafters.receive(now)
            self._drafters.ask(now)

    def _tick(self, now: float) -> None:
        stats = self._stats
        stats.busy_s += self._lap()
        self._scheduler.read_load(stats)
        if self._drafters is not None:
            self._drafters.read_counters(stats)
        if self._files is not None:
            stats.records_written, stats.records_dropped = self._files.counts()
        self._gateways.expire(now)
        self._gateways.send_stats(stats)
        self.published = msgspec.msgpack.encode(stats)

    def _lap(self) -> float:
        now = time.monotonic()
        lap, self._mark = now - self._mark, now
        return lap
