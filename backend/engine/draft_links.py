"""A verifier's `drafts` sockets: requests for drafts and their answers.  Engine process, engine thread."""

import logging
import time
from dataclasses import dataclass

import msgspec
from vllm.v1.engine.core import EngineCore

from backend.engine.feature_link import GREET_EVERY_S
from backend.engine.scheduler import DraftingScheduler
from backend.fleet import DrafterRef, VerifierStats
from backend.fleet.stats import Weights
from backend.transport import Dealer, Hub
from backend.wire import drafting as wire

logger = logging.getLogger(__name__)


@dataclass
class _Link:
    """The `drafts` socket to one drafter."""

    ref: DrafterRef
    dealer: Dealer
    epoch: int
    hello: bytes
    greeted_at: float = float("-inf")
    exchanges: int | None = None
    """`Welcome.exchanges`, as last reported; None before the first."""

    def greet(self, now: float) -> None:
        """Sends `Hello`, at most once per `GREET_EVERY_S`."""
        if now - self.greeted_at >= GREET_EVERY_S:
            self.greeted_at = now
            self.dealer.send(self.hello)


class DraftLinks:
    """The `drafts` sockets to the assigned drafters, and the assignment itself."""

    def __init__(self, hub: Hub, core: EngineCore, verifier_id: str) -> None:
        self._hub = hub
        self._core = core
        self._scheduler: DraftingScheduler = core.scheduler
        self._verifier_id = verifier_id
        self._counters = self._scheduler.counters
        self._links: dict[str, _Link] = {}
        # It starts at the clock: drafters must not take a restarted process for its predecessor.
        self._epoch = time.time_ns() & 0xFFFF_FFFF_FFFF
        self._weights, self._target = 0, ""

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """Applies a new assignment to scheduler and workers, between two steps."""
        if {ref.id: ref for ref in refs} != {drafter_id: link.ref for drafter_id, link in self._links.items()}:
            self._connect(refs)

    def renew(self, loaded: Weights) -> None:
        """Connects to all drafters anew after an exchange of the target's weights, and so opens all requests again.

        Drafters then drop old features and fetch what their heads share with the target.
        """
        refs = [link.ref for link in self._links.values()]
        self._weights += 1
        self._target = f"{loaded.update} {loaded.version} {loaded.path or ''}" if loaded != Weights() else ""
        for ref in refs:
            self._hub.drop(self._links.pop(ref.id).dealer)
            self._scheduler.speculator.questions.reset_drafter(ref.id)
        self._connect(refs)

    def _connect(self, refs: list[DrafterRef]) -> None:
        self._epoch += 1
        for drafter_id, link in list(self._links.items()):
            if link.ref not in refs:
                self._hub.drop(self._links.pop(drafter_id).dealer)
        for ref in refs:
            if ref.id not in self._links:
                dealer = self._hub.dealer(ref.address, ref.server_key)
                hello = wire.Hello(
                    wire.PROTOCOL_VERSION, self._verifier_id, "drafts", self._epoch, weights=self._weights, target=self._target
                )
                self._links[ref.id] = _Link(ref, dealer, self._epoch, wire.encode(hello))
                self._links[ref.id].greet(time.monotonic())
        epochs = {link.ref: link.epoch for link in self._links.values()}
        orders = self._verifier_id, epochs, self._hub.wire.fleet_keys, self._weights
        self._core.collective_rpc("set_drafters", args=orders)
        self._scheduler.set_drafters(refs)
        logger.info("drafters: %s", ", ".join(sorted(self._links)) or "none")

    def receive(self, now: float) -> None:
        """Takes in every message that has arrived from drafters."""
        for drafter_id, link in self._links.items():
            while (frames := link.dealer.receive()) is not None:
                try:
                    message = wire.decode_to_verifier(frames[0])
                except msgspec.DecodeError:
                    self._counters.dropped(drafter_id, "invalid")
                    continue
                if isinstance(message, wire.Drafts):
                    self._scheduler.take_drafts(drafter_id, message, now)
                elif isinstance(message, wire.Ahead):
                    self._scheduler.speculator.take_blocks(drafter_id, message.items, message.draft_us / 1e6, now)
                elif isinstance(message, wire.Want):
                    self._give(link, message)
                elif isinstance(message, wire.Welcome):
                    if link.exchanges not in (None, message.exchanges):
                        self._scheduler.speculator.renewed(drafter_id)
                    link.exchanges = message.exchanges
                elif isinstance(message, wire.Refused) and message.reason == wire.HELLO_FIRST:
                    link.greet(now)
                elif isinstance(message, wire.Refused):
                    logger.warning("drafter %s refuses: %s", drafter_id, message.reason)
                    self._counters.dropped(drafter_id, "invalid")

    def _give(self, link: _Link, want: wire.Want) -> None:
        """Answers `Want` with a part of one of the target's tensors, if all ranks can read it now."""
        if want.first < 0 or self._core.model_executor.is_sleeping:
            return
        pieces: list[tuple[wire.Part, bytes] | None] = self._core.collective_rpc("target_rows", args=(want.name, want.first))
        held = [piece for piece in pieces if piece is not None]
        if len(held) == len(pieces):
            link.dealer.send(wire.encode(held[0][0]), b"".join(data for _, data in held))

    def ask(self, now: float) -> None:
        """Tells each drafter what to draft next for the requests whose step has ended."""
        for drafter_id, items in self._scheduler.ask(now).items():
            link = self._links.get(drafter_id)
            if link is not None:
                chance_weights = self._scheduler.speculator.candidates.chance_weights(drafter_id)
                link.dealer.send(wire.encode(wire.Next(items, chance_weights)))

    def read_counters(self, stats: VerifierStats) -> None:
        """Adds what the sending worker counted since the last call, and the plan in force.

        A drafter that does not answer is greeted again, which changes nothing if it knows this verifier.
        """
        for shipped in self._core.collective_rpc("take_drafting_counters"):
            for drafter_id, sent in shipped.items():
                counters = self._counters.drafter(drafter_id)
                counters.bytes_sent += sent.bytes_sent
                counters.handovers += sent.handovers
                counters.handover_rows += sent.handover_rows
                counters.handover_bytes += sent.handover_bytes
                for reason, n in sent.dropped.items():
                    self._counters.dropped(drafter_id, reason, n)
        for drafter_id in self._scheduler.speculator.questions.down():
            if drafter_id in self._links:
                self._links[drafter_id].greet(time.monotonic())
        self._scheduler.read_plan(stats)
