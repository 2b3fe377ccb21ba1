"""The verifier's main loop.  Engine process; everything here runs on the one engine thread.

    receive   requests, aborts and drafts
    wait      with nothing to do, or for drafts worth waiting for
    step      vLLM schedules, runs and samples
    publish   outputs to the gateways; features have already left for the drafters

All time is accounted for: each stretch is either busy or idle for one cause, so busy + idle = wall.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine.core import EngineCore

from backend.engine.counting import Counters
from backend.engine.feature_link import GREET_EVERY_S
from backend.engine.gateways import GatewayPort
from backend.engine.scheduler import DraftingScheduler
from backend.fleet import DrafterRef, VerifierStats
from backend.transport import Dealer, Hub
from backend.wire.drafting import HELLO_FIRST, PROTOCOL_VERSION, Ahead, Drafts, Hello, Refused, decode_to_verifier, encode

if TYPE_CHECKING:
    from backend.engine.weights import WeightControl
    from backend.records.writer import FileRecorder

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often counters are published and leases looked at."""


@dataclass
class _Link:
    """The receiving socket towards one drafter."""

    ref: DrafterRef
    dealer: Dealer
    hello: bytes
    greeted_at: float = float("-inf")

    def greet(self, now: float) -> None:
        """Says who we are, unless that was said a moment ago."""
        if now - self.greeted_at >= GREET_EVERY_S:
            self.greeted_at = now
            self.dealer.send(self.hello)


class DraftLinks:
    """The receiving sockets towards the assigned drafters, and the assignment itself."""

    def __init__(self, hub: Hub, core: EngineCore, verifier_id: str, counters: Counters) -> None:
        self._hub = hub
        self._core = core
        self._scheduler: DraftingScheduler = core.scheduler
        self._verifier_id = verifier_id
        self._counters = counters
        self._links: dict[str, _Link] = {}
        # Answers carry the epoch they were asked in: a process that restarts must not accept its predecessor's.
        self._epoch = time.time_ns() & 0xFFFF_FFFF_FFFF
        self._weights = 0

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """Applies a new assignment between two steps, on the scheduler's side and on every worker."""
        wanted = {ref.id: ref for ref in refs}
        if wanted != {drafter_id: link.ref for drafter_id, link in self._links.items()}:
            self._connect(refs, wanted)

    def renew(self) -> None:
        """The target has other weights: drafters forget what they have of its features, and all requests are opened anew."""
        refs = [link.ref for link in self._links.values()]
        self._weights += 1
        for link in self._links.values():
            self._hub.drop(link.dealer)
            self._scheduler.speculator.questions.reset_drafter(link.ref.id)
        self._links.clear()
        self._connect(refs, {ref.id: ref for ref in refs})

    def _connect(self, refs: list[DrafterRef], wanted: dict[str, DrafterRef]) -> None:
        self._epoch += 1
        for drafter_id, link in list(self._links.items()):
            if wanted.get(drafter_id) != link.ref:
                self._hub.drop(link.dealer)
                del self._links[drafter_id]
        for ref in refs:
            if ref.id not in self._links:
                identity = f"{self._verifier_id}/drafts/{self._epoch}"
                dealer = self._hub.dealer(ref.address, identity, ref.server_key)
                hello = encode(Hello(PROTOCOL_VERSION, self._verifier_id, "drafts", self._epoch, weights=self._weights))
                self._links[ref.id] = _Link(ref, dealer, hello)
                self._links[ref.id].greet(time.monotonic())
        self._core.collective_rpc("set_drafters", args=(refs, self._epoch, self._hub.wire.fleet_keys, self._weights))
        self._scheduler.set_drafters(refs)
        logger.info("drafters: %s", ", ".join(sorted(wanted)) or "none")

    def receive(self, now: float) -> None:
        """Takes every answer that has arrived."""
        for drafter_id, link in self._links.items():
            while (frames := link.dealer.receive()) is not None:
                try:
                    message = decode_to_verifier(frames[0])
                except msgspec.DecodeError:
                    self._counters.dropped(drafter_id, "invalid")
                    continue
                if isinstance(message, Drafts):
                    self._scheduler.take_drafts(drafter_id, message, now)
                elif isinstance(message, Ahead):
                    self._scheduler.take_ahead(drafter_id, message)
                elif isinstance(message, Refused) and message.reason == HELLO_FIRST:
                    link.greet(now)
                elif isinstance(message, Refused):
                    logger.warning("drafter %s refuses: %s", drafter_id, message.reason)
                    self._counters.dropped(drafter_id, "invalid")

    def ask(self, now: float) -> None:
        """Drafters are told what to draft next for the requests whose step has ended."""
        for drafter_id, items in self._scheduler.ask(now).items():
            link = self._links.get(drafter_id)
            if link is not None:
                link.dealer.send(encode(self._scheduler.next_message(self._epoch, drafter_id, items)))

    def read_counters(self, stats: VerifierStats) -> None:
        """Adds what the sending worker counted since the last call.

        A drafter that the worker had to greet again knows us no more: it is greeted here too, or its answers would go nowhere.
        So is one that does not answer; to a drafter that knows us a greeting is nothing new.
        """
        for shipped in self._core.collective_rpc("take_drafting_counters"):
            for drafter_id, n in shipped.bytes_sent.items():
                self._counters.drafter(drafter_id).bytes_sent += n
            for drafter_id, handed in shipped.handovers.items():
                counters = self._counters.drafter(drafter_id)
                counters.handovers += handed.requests
                counters.handover_rows += handed.rows
                counters.handover_bytes += handed.bytes_sent
            for drafter_id, n in shipped.overflows.items():
                self._counters.dropped(drafter_id, "overflow", n)
            for drafter_id in (*shipped.greeted, *self._scheduler.speculator.questions.down()):
                if drafter_id in self._links:
                    self._links[drafter_id].greet(time.monotonic())
        self._scheduler.read_plan(stats)


class EngineLoop:
    """See the module's text."""

    def __init__(
        self,
        core: EngineCore,
        hub: Hub,
        gateways: GatewayPort,
        drafters: DraftLinks | None,
        counters: Counters,
        files: FileRecorder | None = None,
        weights: WeightControl | None = None,
    ) -> None:
        self._weights = weights
        self._core = core
        self._scheduler: Any = core.scheduler
        self._hub = hub
        self._gateways = gateways
        self._drafters = drafters
        self._counters = counters
        self._files = files
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._mark = time.monotonic()
        self._next_tick = 0.0
        self._stalled = False
        self.published = msgspec.msgpack.encode(counters.stats)

    # -- other threads -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `run` after the present step."""
        self._stopping.set()
        self._hub.wake()

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """Orders a new assignment."""
        if self._drafters is not None:
            links = self._drafters
            self._orders.put(lambda: links.set_drafters(refs))
            self._hub.wake()

    def run_soon(self, function: Callable[[], object]) -> Future[None]:
        """Has the engine thread run `function` between two steps (idle time of cause `swap`); the future has what it raises."""
        future: Future[None] = Future()

        def work() -> None:
            try:
                function()
                future.set_result(None)
            except Exception as error:
                # The caller gets it; the engine goes on.
                future.set_exception(error)

        self._orders.put(work)
        self._hub.wake()
        return future

    # -- the engine thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`."""
        self._mark = time.monotonic()
        while not self._stopping.is_set():
            self._receive()
            wait = self._wait()
            if wait is not None:
                self._idle(*wait)
            else:
                self._step()

    def _receive(self) -> None:
        now = time.monotonic()
        while not self._orders.empty():
            self._counters.busy(self._lap())
            self._orders.get_nowait()()
            # Another head's projection may have to be loaded for it.
            self._counters.idle("swap", self._lap())
        self._gateways.receive(now)
        if swapping_s := self._gateways.take_swapping_s():
            self._counters.busy(self._lap() - swapping_s)
            self._counters.idle("swap", swapping_s)
        if self._drafters is not None:
            self._drafters.receive(now)
            self._drafters.ask(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)

    def _wait(self) -> tuple[str, float] | None:
        """Why and how long not to step; None: step now."""
        now = time.monotonic()
        if self._weights is not None and self._weights.is_paused:
            return "swap", self._next_tick - now
        if not self._scheduler.has_requests():
            return "no_work", self._next_tick - now
        if self._drafters is not None:
            until = self._scheduler.wait_until(now)
            if until is not None and until > now:
                self._scheduler.learn()
                return "awaiting_draft", max(min(until, self._next_tick) - time.monotonic(), 0.0)
        if self._stalled:
            # Requests exist and none can run yet: a grammar is compiling, or KV is on its way.
            self._stalled = False
            return "no_work", 0.001
        return None

    def _idle(self, cause: str, seconds: float) -> None:
        self._counters.busy(self._lap())
        self._hub.poll(max(seconds, 0.0))
        self._counters.idle(cause, self._lap())

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        self._gateways.send_outputs(outputs)
        self._core.post_step(executed)
        self._stalled = not executed and self._scheduler.has_requests()
        lap, verify_s = self._lap(), self._scheduler.take_verify_s()
        self._counters.step(lap, verify_s, ran=executed)
        if executed:
            self._scheduler.note_step(lap)
        self._scheduler.record_step(lap, verify_s)

    def _tick(self, now: float) -> None:
        stats = self._counters.stats
        self._counters.busy(self._lap())
        self._scheduler.read_load(stats)
        stats.paused = self._weights is not None and self._weights.is_paused
        if self._drafters is not None:
            self._drafters.read_counters(stats)
        if self._files is not None:
            stats.records_written, stats.records_dropped = self._files.counts()
        stats.connections_refused = self._gateways.connections_refused()
        self._gateways.expire(now)
        self._gateways.send_stats(stats)
        self.published = msgspec.msgpack.encode(stats)

    def _lap(self) -> float:
        now = time.monotonic()
        lap, self._mark = now - self._mark, now
        return lap
