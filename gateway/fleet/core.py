"""vLLM's `EngineCoreClient` over the fleet: requests go to the verifier that routing chose, outputs come back merged.

Owns a record of every sequence in flight with all its tokens.  The record makes failover and migration one operation: cut a
sequence off from one verifier, give it with its tokens to another, and go on with the same stream.  Runs in the gateway's event
loop; no threads, no locks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from backend.config import Settings
from backend.engine import front as vllm
from backend.fleet import FleetSnapshot, VerifierStats
from backend.routing.choosing import Choosing
from backend.transport.sockets import Wire
from backend.wire.engine import PAUSED, Account, RequestOptions
from gateway.admission.claim import current_claim
from gateway.admission.gate import Gate
from gateway.admission.room import Rooms
from gateway.fleet.directory import Directory
from gateway.fleet.engine_link import Cause, VerifierLink
from gateway.fleet.sequences import AwaitedAccounts, InFlight, Sequences
from gateway.fleet.statistics import Cut
from gateway.fleet.verifiers import Verifiers
from gateway.http.errors import Aborted, NoVerifier, Poisoned, ShuttingDown, Unavailable, VerifierLost
from gateway.metrics.gateway import GatewayMetrics

logger = logging.getLogger(__name__)

POISON_AFTER = 2
"""Number of verifiers lost under a request after which the request is refused instead of tried again."""
_REASONS: dict[type[Unavailable], str] = {Poisoned: "poisoned", Aborted: "aborted"}
"""How the metrics name failures; all others are `lost`."""


class FleetCore(Verifiers, vllm.EngineCoreClient):
    """The fleet, with the interface of an engine core for vLLM's front half.

    It calls `on_failed(request_ids, error)` when requests fail without the client's fault, and `on_interactive()` before it
    submits a sequence outside of batches; `on_counters(stats)` gets each report of a verifier.  `on_look()` follows each answer
    of the directory, before sequences leave draining verifiers.  `on_gone(link, cause, count)` says that a verifier is lost,
    before its `count` sequences go on elsewhere.
    """

    def __init__(
        self, directory: Directory, wire: Wire, metrics: GatewayMetrics, settings: Settings, patience: float = 1.0
    ) -> None:
        super().__init__(directory, wire, patience)
        self.on_failed: Callable[[list[str], Unavailable], None] = lambda ids, error: None
        self.on_interactive: Callable[[], None] = lambda: None
        self.on_counters: Callable[[VerifierStats], None] = lambda stats: None
        self.on_look: Callable[[], None] = lambda: None
        self.on_gone: Callable[[VerifierLink, Cause, int], None] = lambda link, cause, count: None
        # AsyncLLM checks whether its engine core is dead.  A fleet never counts as dead.
        self.resources = SimpleNamespace(engine_dead=False)
        self._metrics = metrics
        self.choosing = Choosing(settings.gateway.affinity)
        self.draining = False
        """No new requests are taken."""
        self.sequences = Sequences()
        # Over at their verifiers, for these reasons, while vLLM has yet to put their last tokens into answers.
        self._ending: dict[str, tuple[InFlight, str]] = {}
        self._rooms = Rooms(settings.verifier.max_num_seqs)
        self.gate = Gate(self._room, settings.gateway.max_in_flight, settings.gateway.queue_wait_s, self.all_paused)
        # A lost verifier's incarnation, and the place ids of sequences that may still run there.  Aborted if it comes back.
        self._orphans: dict[str, tuple[str, list[str]]] = {}
        self._accounts = AwaitedAccounts()
        self._outputs: asyncio.Queue[vllm.EngineCoreOutputs] = asyncio.Queue()

    # New requests

    async def until_routable(self) -> None:
        """Returns when there is a verifier for a new request.  Raises `NoVerifier` or `ShuttingDown`."""
        if self.draining:
            raise ShuttingDown
        await self.wait_routable(self.gate.wait_s)

    async def admit(self) -> None:
        """Waits until the current request may be submitted.  Raises `NoVerifier`, or `Overloaded` when too many wait."""
        # The last verifier may have been lost while the prompt was tokenized.
        await self.wait_routable(self.gate.wait_s)
        await self.gate.enter(current_claim())

    def free_reserved(self) -> None:
        """Frees room reserved for the current request: no more of it will be submitted."""
        self.gate.free_reserved(current_claim())

    def _room(self) -> float:
        """How many more sequences the routable verifiers can take."""
        return sum(self._rooms.left(link.member.id, self.sequences.placed(link.member.id)) for link in self.routable_links())

    # What the directory and the links report

    def look(self, snapshot: FleetSnapshot) -> None:
        super().look(snapshot)
        self.on_look()
        self._place_waiting()
        for view in snapshot.members:
            # Sequences that no other verifier takes stay, and are tried again with the next answer.
            if view.drain is not None and view.drain.migrate:
                self.migrate(self.sequences.at(self.links.get(view.member.id)), None, "drain")

    def on_ready(self, link: VerifierLink) -> None:
        incarnation, orphans = self._orphans.pop(link.member.id, ("", []))
        if incarnation == link.member.incarnation:
            link.abort(orphans)
        for record in self.sequences:
            # The verifier had only been stopped or starved, so no request has killed it.
            record.lost.discard(link.member.incarnation)
        super().on_ready(link)
        self._place_waiting()

    def on_taken(self, link: VerifierLink, place_id: str) -> None:
        record = self.sequences.running_as(place_id)
        if record is not None and record.link is link:
            record.taken = True

    def on_outputs(self, link: VerifierLink, outputs: vllm.EngineCoreOutputs) -> None:
        now = time.monotonic()
        kept = [output for output in outputs.outputs if self._take(link, output, now)]
        if kept:
            outputs.outputs = kept
            self._outputs.put_nowait(outputs)

    def on_accounts(self, link: VerifierLink, accounts: Sequence[Account]) -> None:
        self._accounts.came(accounts)

    def on_stats(self, link: VerifierLink, stats: VerifierStats) -> None:
        self.on_counters(stats)
        self.weights.compare(link)
        own = self.sequences.placed(link.member.id)
        self.choosing.observe(stats, own)
        self._rooms.observe(stats, own)
        self.gate.look()

    def on_forgotten(self, link: VerifierLink) -> None:
        self._accounts.lost(link)
        self._fail_over(self.sequences.at(link), "forgotten")

    def on_lost(self, link: VerifierLink, cause: Cause, died: bool) -> None:
        super().on_lost(link, cause, died)
        self._accounts.lost(link)
        if link.member.id not in self.links:
            self.choosing.gone(link.member.id)
            self._rooms.gone(link.member.id)
        orphans = self.sequences.at(link)
        level = logging.WARNING if orphans else logging.INFO
        what = f"; its {len(orphans)} sequences go on at another, or wait for one" if orphans else ""
        logger.log(level, "verifier %s gone (%s)%s", link.member.id, cause, what)
        self.on_gone(link, cause, len(orphans))
        self._orphans[link.member.id] = link.member.incarnation, [record.place_id for record in orphans]
        self._fail_over(orphans, cause, died)

    def _take(self, link: VerifierLink, output: vllm.EngineCoreOutput, now: float) -> bool:
        """Records one output in its sequence.  False if it is out of date or must not reach the client."""
        record = self.sequences.running_as(output.request_id)
        if record is None or record.link is not link:
            return False
        if output.stop_reason == PAUSED and not record.claim.patient:
            output.stop_reason = None
        elif output.finish_reason == vllm.FinishReason.ABORT:
            # The verifier has given up on the sequence.  One that this gateway had aborted would not be found above.
            self._fail_over([record], "given_up", died=True)
            return False
        if output.finish_reason is not None and record.request.pooling_params is not None and output.pooling_output is None:
            self._fail([record], Aborted)
            return False
        output.request_id = record.request.request_id
        record.claim.heard_at = now
        if output.new_token_ids:
            self._metrics.on_tokens(record, now)
            record.cut = None
            self.sequences.grown(record, output.new_token_ids, now)
        if output.finish_reason is not None:
            self._accounts.ended(record.place_id)
            self._leave(record, str(output.finish_reason))
        return True

    def on_emitted(self, request_id: str, tokens: int, last: bool) -> None:
        """vLLM has put tokens of a sequence into its answer: these are shown and charged.  It aborts at a stop string."""
        record, reason = self._ending.get(request_id) or (self.sequences.get(request_id), "")
        if record is None:
            return
        record.emitted_tokens += tokens
        record.claim.output_tokens += tokens
        self._metrics.tokens.inc(tokens)
        if last and reason:
            self._end(record, reason)

    def _leave(self, record: InFlight, reason: str) -> None:
        """It is over at its verifier, and its last tokens are on their way to vLLM."""
        self.sequences.remove(record)
        self._ending[record.request.request_id] = record, reason
        self.gate.look()

    def _end(self, record: InFlight, reason: str) -> None:
        """Forgets a sequence that has ended, and settles its claim."""
        self.sequences.remove(record)
        self._ending.pop(record.request.request_id, None)
        self._metrics.on_finished(record, reason)
        record.claim.ended()
        if not record.claim.running:
            self.gate.settle(record.claim)
            self.gate.free_reserved(record.claim)
        self.gate.look()
        if reason not in ("poisoned", "lost"):
            self.share(record)

    def _fail(self, records: Sequence[InFlight], error: type[Unavailable]) -> None:
        if not records:
            return
        for record in records:
            self._end(record, _REASONS.get(error, "lost"))
        self.on_failed([record.request.request_id for record in records], error())

    def fail_all(self, error: type[Unavailable]) -> None:
        """Fails every request with `error`, here and at the verifiers."""
        for link in self.ready_links:
            link.abort([record.place_id for record in self.sequences.at(link)])
        self.gate.fail_all(error)
        self._fail(list(self.sequences), error)

    # Moving sequences: cut, place

    def _fail_over(self, records: Sequence[InFlight], cause: str, died: bool = False) -> None:
        """Continues sequences that have lost their verifier, now or when there is another.

        Each may be the reason if the verifier has `died`; after too many such losses, a sequence fails as `Poisoned`.
        """
        if died:
            for record in records:
                record.blame(cause)
        poisoned = [record for record in records if len(record.lost) >= POISON_AFTER and not record.claim.patient]
        if poisoned:
            logger.error("%d sequences refused: %d verifiers were lost under each", len(poisoned), POISON_AFTER)
        self._fail(poisoned, Poisoned)
        left = [record for record in records if record in self.sequences]
        cut = Cut("failover", cause, time.monotonic())
        for record in left:
            self.sequences.cut(record, cut)
        for record in left:
            if not self._place(record):
                loop = asyncio.get_running_loop()
                record.giving_up = loop.call_later(self.gate.wait_s, self._fail, [record], VerifierLost)

    def migrate(self, records: Sequence[InFlight], target: str | None, cause: str) -> int:
        """Moves sequences to the verifier `target`, or to one that routing chooses.  Returns how many moved.

        Tokens so far are kept; further ones of the old verifier are discarded.  A sequence that cannot be moved (waiting,
        already there, or taken by no verifier) stays as it is.
        """
        moved = 0
        for record in records:
            old = record.link
            chosen = None if old is None else self._choose(record, without=old, target=target)
            if old is None or chosen is None:
                continue
            old.abort([record.place_id])
            self.sequences.cut(record, Cut("migration", cause, time.monotonic()))
            self._give(record, chosen)
            moved += 1
        if moved:
            logger.info("%d sequences migrated (%s)", moved, cause)
        return moved

    def hold_batches(self, most: int) -> None:
        """Limits batches to `most` sequences at the verifiers: takes the latest away, or lets the earliest held ones go on."""
        running = [record for record in self.sequences.batches if record.link is not None]
        for record in running[max(most, 0) :]:
            assert record.link is not None
            record.link.abort([record.place_id])
            self.sequences.cut(record, None)
            record.held = True
        if len(running) < most:
            for record in [record for record in self.sequences.batches if record.held][: most - len(running)]:
                record.held = False
                self._place(record)

    def _place_waiting(self) -> None:
        """There may be room: for sequences that have lost their verifier, then for new ones."""
        for record in self.sequences.waiting():
            self._place(record)
        self.gate.look()

    def _place(self, record: InFlight, target: str | None = None) -> bool:
        """Gives a sequence without a verifier to one, or to the verifier `target`.  False if no verifier takes it."""
        link = self._choose(record, target=target)
        if link is None:
            return False
        self._give(record, link)
        return True

    def _choose(self, record: InFlight, without: VerifierLink | None = None, target: str | None = None) -> VerifierLink | None:
        links = {
            link.member.id: link
            for link in self.routable_links()
            if link is not without and target in (None, link.member.id) and record.fits(link)
        }
        chosen = self.choosing.choose(record.ask, {each: self.sequences.load(each) for each in links})
        return links.get(chosen) if chosen is not None else None

    def _give(self, record: InFlight, link: VerifierLink) -> None:
        if record.giving_up is not None:
            record.giving_up.cancel()
            record.giving_up = None
        if link.welcome is not None and not record.places:
            record.context = link.welcome.max_model_len
        record.places += 1
        record.placed_at = time.monotonic()
        record.taken = False
        options = record.claim.options
        link.add(record.request, record.place_id, record.emitted, options if options != RequestOptions() else None)
        self._accounts.placed(record, link)
        self.sequences.put(record, link)
        record.claim.verifier = link.member.id
        self.choosing.given(link.member.id)
        if record.cut is not None:
            self._metrics.on_moved(record, record.cut)

    # EngineCoreClient: requests

    async def get_output_async(self) -> vllm.EngineCoreOutputs:
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        await self.wait_routable(self.gate.wait_s)
        return tuple(next(link.welcome.supported_tasks for link in self.ready_links if link.welcome is not None))

    async def add_request_async(self, request: vllm.EngineCoreRequest) -> None:
        """Routes and submits a sequence.  Raises `NoVerifier`, or `VLLMValidationError` if the request cannot be encoded."""
        arrived = time.monotonic() - max(0.0, time.time() - request.arrival_time)
        claim = current_claim()
        # The last verifier may have been lost since it was admitted.
        await self.wait_routable(self.gate.wait_s)
        record = InFlight(request, None, arrived, claim=claim)
        if not record.batched:
            self.on_interactive()
        if claim.speculation is not None:
            prompt_id = request.external_req_id or ""
            record.statistics = claim.speculation.follow(record, request.request_id, prompt_id, claim.choices)
        if claim.aborted:
            if request.pooling_params is not None:
                raise Aborted
            self._put_aborted([record])
            return
        try:
            if not self._place(record, claim.target):
                raise NoVerifier
        except OverflowError:
            raise vllm.VLLMValidationError("A number in the request is out of range.") from None
        claim.began(len(request.prompt_token_ids or ()), record.placed_at)
        self.gate.placed(claim)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Ends sequences.  Never suspends, so that it also works in a task that is being cancelled."""
        for request_id in request_ids:
            if request_id in self._ending:
                self._end(*self._ending[request_id])
        known = [self.sequences.get(request_id) for request_id in dict.fromkeys(request_ids)]
        self._abort([record for record in known if record is not None], self._end)

    def finish(self, records: Sequence[InFlight]) -> None:
        """Ends sequences as aborted, after all tokens that have arrived for them; embeddings fail."""
        pooling = [each for each in records if each.request.pooling_params is not None]
        writing = [each for each in records if each.request.pooling_params is None]
        self._abort(pooling, lambda record, reason: self._fail([record], Aborted))
        self._abort(writing, self._leave)
        self._put_aborted(writing)

    def _put_aborted(self, records: Sequence[InFlight]) -> None:
        ended = [vllm.EngineCoreOutput(each.request.request_id, [], finish_reason=vllm.FinishReason.ABORT) for each in records]
        self._outputs.put_nowait(vllm.EngineCoreOutputs(outputs=ended))

    def _abort(self, records: Sequence[InFlight], over: Callable[[InFlight, str], None]) -> None:
        running: dict[VerifierLink, list[str]] = {}
        for record in records:
            if record.link is not None:
                running.setdefault(record.link, []).append(record.place_id)
            over(record, "aborted")
        for link, place_ids in running.items():
            link.abort(place_ids)

    # EngineCoreClient: utility methods, called at every verifier

    async def add_lora_async(self, lora_request: Any) -> bool:
        # A verifier that joins later needs no call: verifiers also load an adapter when its first request comes.
        return all(await self.everywhere("add_lora", lora_request))

    async def remove_lora_async(self, lora_id: int) -> bool:
        return all(await self.everywhere("remove_lora", lora_id))

    def shutdown(self, timeout: float | None = None) -> None:
        self.fail_all(ShuttingDown)
        self.close()
