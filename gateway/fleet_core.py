"""vLLM's `EngineCoreClient` over the fleet: requests go to the verifier that routing chose, outputs come back merged.

Owns the links to the verifiers, the directory's last answer, and a record of every sequence in flight with all its tokens.
The record makes failover and migration one operation: cut a sequence off from one verifier, give it with its tokens to another,
and go on with the same stream.  Runs in the gateway's event loop; no threads, no locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from backend.engine.front import (
    EngineCoreClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    VLLMValidationError,
)
from backend.fleet import FleetSnapshot, Member, VerifierStats
from backend.fleet.speed import RESPONSE_TOKENS
from backend.routing.choosing import Choosing
from backend.routing.routers import LeastLoaded, Router
from backend.transport.sockets import Wire
from backend.wire.engine import GATEWAY_LEASE_S, PAUSED, SHARED_SUFFIX, Account, RequestOptions, Said
from gateway.admission.claim import current_claim
from gateway.admission.gate import Gate, Queueing
from gateway.admission.room import Rooms
from gateway.directory import Directory, follow
from gateway.engine_link import DECLARED_LOST, RESTARTED, Loss, VerifierLink
from gateway.errors import NoVerifier, Poisoned, ShuttingDown, Unavailable, VerifierLost
from gateway.in_flight import Cut, InFlight, Sequences, TrafficObserver
from gateway.inquiry import AwaitedAccounts
from gateway.pauses import Pauses
from gateway.weights_in_force import WeightsInForce

logger = logging.getLogger(__name__)

FRESH_S = 1.5
"""Seconds after its last message in which a verifier counts as alive, whatever the directory reports.  Counters come four
times a second."""
HOLD_S = 10.0
"""Seconds that new requests wait after the last verifier was lost.  One that was only stopped or starved soon comes back."""
POISON_AFTER = 2
"""Number of verifiers lost under a request after which the request is refused instead of tried again."""


class FleetCore(EngineCoreClient):
    """The fleet, with the interface of an engine core for vLLM's front half.

    It calls `on_failed(request_ids, error)` when requests fail without the client's fault, `on_welcome(link)` when a verifier
    has become usable, and `on_interactive()` before it submits a sequence outside of batches.
    """

    def __init__(
        self,
        directory: Directory,
        wire: Wire,
        observer: TrafficObserver,
        *,
        router: Router | None = None,
        slots: int | None = None,
        queueing: Queueing | None = None,
    ) -> None:
        self.gateway_id = f"gateway-{uuid.uuid4().hex[:8]}"
        self.snapshot: FleetSnapshot | None = None
        self.links: dict[str, VerifierLink] = {}
        self.on_failed: Callable[[list[str], Unavailable], None] = lambda ids, error: None
        self.on_welcome: Callable[[VerifierLink], None] = lambda link: None
        self.on_interactive: Callable[[], None] = lambda: None
        self.first_ready = asyncio.Event()
        # AsyncLLM checks whether its engine core is dead.  A fleet never counts as dead.
        self.resources = SimpleNamespace(engine_dead=False)
        self.directory = directory
        self._wire = wire
        self._observer = observer
        self.choosing = Choosing(router or LeastLoaded())
        self._stopping = False
        self.weights = WeightsInForce()
        self.pauses = Pauses()
        self.draining = False
        """No new requests are taken."""
        # When a verifier was last routable (monotonic seconds), and the event that new requests wait for while none is.
        self._served_at = float("-inf")
        self._arrival = asyncio.Event()
        self._sequences = Sequences()
        # Over at their verifiers, for these reasons, while vLLM has yet to put their last tokens into answers.
        self._ending: dict[str, tuple[InFlight, str]] = {}
        self._rooms = Rooms(slots)
        self.gate = Gate(self._room, queueing or Queueing())
        # Place ids of sequences that may still run at a lost verifier, by its id and incarnation.  Aborted if it comes back.
        self._strays: dict[tuple[str, str], list[str]] = {}
        self._accounts = AwaitedAccounts()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._poller: asyncio.Task[None] | None = None

    # The fleet's membership

    def start(self) -> None:
        """Begins to follow the directory; requires a running event loop."""
        if self._poller is None:
            self._poller = asyncio.create_task(follow(self.directory, self._look), name="fleet-directory")

    @property
    def ready_links(self) -> list[VerifierLink]:
        """Verifiers with a working connection, draining ones included."""
        return [link for link in self.links.values() if link.state == "ready"]

    @property
    def in_flight(self) -> int:
        """Sequences being served, including those that wait for a verifier."""
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        """Sequences that have lost their verifier and wait for another."""
        return len(self._sequences.waiting())

    @property
    def batched(self) -> int:
        """Sequences of batches at verifiers."""
        return sum(record.link is not None for record in self._sequences.batched)

    @property
    def expecting(self) -> bool:
        """Whether a sequence that belongs to no batch has no token yet."""
        return self._sequences.expecting

    @property
    def held(self) -> int:
        """Sequences of batches that have given way to others."""
        return sum(record.held for record in self._sequences.batched)

    @property
    def sequences(self) -> list[InFlight]:
        return list(self._sequences)

    def requests_at(self, verifier_id: str) -> list[str]:
        """The ids of this gateway's sequences at a verifier, as `migrate` takes them."""
        link = self.links.get(verifier_id)
        return [record.request.request_id for record in self._sequences.at(link)] if link is not None else []

    def stats(self) -> list[VerifierStats]:
        """The last counters of every connected verifier, as far as received."""
        return [link.stats for link in self.ready_links if link.stats is not None]

    @property
    def response_tokens(self) -> float:
        """Mean tokens of a response, as measured by the verifiers."""
        lengths = [stats.response_tokens for stats in self.stats()]
        return sum(lengths) / len(lengths) if lengths else RESPONSE_TOKENS

    def routable(self) -> list[VerifierLink]:
        """The verifiers for new requests: with the newest weights, not draining, and awake unless all sleep."""
        ready = [link for link in self.ready_links if link.member.state == "ready" and not self.weights.is_behind(link)]
        running = [link for link in ready if not self.pauses.holds(link.member.id)]
        awake = [link for link in running if link.stats is None or not link.stats.paused]
        return awake or ready

    async def until_routable(self) -> None:
        """Returns when there is a verifier for a new request.  Waits only if the last verifier was lost less than `HOLD_S` ago.

        Raises `NoVerifier` or `ShuttingDown`.
        """
        if self.draining:
            raise ShuttingDown
        if self.routable():
            return
        until = self._served_at + min(self.gate.wait_s, HOLD_S)
        while not self.routable():
            left = until - time.monotonic()
            if left <= 0:
                raise NoVerifier
            arrival = self._arrival
            try:
                await asyncio.wait_for(arrival.wait(), left)
            except TimeoutError:
                raise NoVerifier from None

    async def admit(self) -> None:
        """Waits until the current request may be submitted.  Raises `NoVerifier`, or `Overloaded` when too many wait."""
        if not self.routable():
            raise NoVerifier
        await self.gate.enter(current_claim())

    def abandon(self) -> None:
        """Frees room reserved for the current request: no more of it will be submitted."""
        self.gate.abandon(current_claim())

    def _tell_arrival(self) -> None:
        self._arrival.set()
        self._arrival = asyncio.Event()

    def _look(self, snapshot: FleetSnapshot) -> None:
        self.snapshot = snapshot
        self._apply([view.member for view in snapshot.members if view.member.kind == "verifier"])
        for view in snapshot.members:
            # Sequences that no other verifier takes stay, and are tried again with the next answer.
            if view.drain is not None and view.drain.migrate:
                self.migrate(self.requests_at(view.member.id), None, "drain")

    def _apply(self, members: Iterable[Member]) -> None:
        """Connects to new verifiers and drops lost ones.

        One that is only missing keeps its link while it answers: a coordinator that has just restarted knows no members.
        """
        members = list(members)
        known = {member.id for member in members}
        for link in [each for each in self.links.values() if each.state != "ready" and each.member.id not in known]:
            link.close()
        for member in members:
            current = self.links.get(member.id)
            if current is not None and member.incarnation != current.member.incarnation:
                current.close(RESTARTED)
                current = None
            elif current is not None and member.state == "lost":
                if current.answers(FRESH_S):
                    # Only the connection between coordinator and verifier is broken.
                    continue
                current.close(DECLARED_LOST)
                current = None
            if current is not None:
                current.member = member
            elif member.state == "ready":
                self._connect(member)
        self._place_waiting()
        if self.routable():
            self._served_at = time.monotonic()
            self._tell_arrival()
            self.gate.look()

    def _connect(self, member: Member) -> None:
        try:
            link = VerifierLink(member, self._wire, self.gateway_id, self, GATEWAY_LEASE_S)
        except (ValueError, OSError) as error:
            logger.error("cannot connect to verifier %s: %s", member.id, type(error).__name__)
            return
        self.links[member.id] = link
        link.start()

    # What links report (LinkListener)

    def on_ready(self, link: VerifierLink) -> None:
        logger.info("verifier %s is ready", link.member.id)
        strays = self._strays.pop((link.member.id, link.member.incarnation), [])
        if strays:
            link.abort(strays)
        if self.pauses.holds(link.member.id):
            # Sent before any request is.
            link.call("pause", "keep", False).add_done_callback(_tell_of_failure)
        self.weights.compare(link)
        for record in self._sequences:
            # The verifier had only been stopped or starved, so no request has killed it.
            record.lost.discard(link.member.incarnation)
        self.on_welcome(link)
        self.first_ready.set()
        self._place_waiting()
        self._tell_arrival()
        self.gate.look()

    def on_taken(self, link: VerifierLink, place_id: str) -> None:
        record = self._sequences.running_as(place_id)
        if record is not None and record.link is link:
            record.taken = True

    def on_outputs(self, link: VerifierLink, outputs: EngineCoreOutputs) -> None:
        now = time.monotonic()
        kept = [output for output in outputs.outputs if self._take(link, output, now)]
        if kept:
            outputs.outputs = kept
            self._outputs.put_nowait(outputs)

    def on_accounts(self, link: VerifierLink, accounts: Sequence[Account]) -> None:
        self._accounts.came(accounts)

    def on_stats(self, link: VerifierLink, stats: VerifierStats) -> None:
        self.weights.compare(link)
        own = self._sequences.placed(link.member.id)
        self.choosing.observe(stats, link.welcome, own)
        self._rooms.observe(stats, own)
        self.gate.look()

    def on_forgotten(self, link: VerifierLink) -> None:
        self._accounts.lost(link)
        self._fail_over(self._sequences.at(link), "forgotten")

    def on_lost(self, link: VerifierLink, loss: Loss) -> None:
        self._accounts.lost(link)
        self.weights.gone(link)
        if link.welcome is not None:
            self._served_at = time.monotonic()
        if self.links.get(link.member.id) is link:
            del self.links[link.member.id]
            self.choosing.gone(link.member.id)
            self._rooms.gone(link.member.id)
        orphans = self._sequences.at(link)
        level = logging.WARNING if orphans else logging.INFO
        logger.log(level, "verifier %s gone (%s) with %d sequences", link.member.id, loss.cause, len(orphans))
        if self._stopping:
            self._fail(orphans, ShuttingDown)
            return
        for gone in [key for key in self._strays if key[0] == link.member.id]:
            del self._strays[gone]
        if orphans:
            self._strays[link.member.id, link.member.incarnation] = [record.place_id for record in orphans]
        self._fail_over(orphans, loss.cause, died=loss.blames_verifier)

    def _take(self, link: VerifierLink, output: EngineCoreOutput, now: float) -> bool:
        """Records one output in its sequence.  False if it is out of date or must not reach the client."""
        record = self._sequences.running_as(output.request_id)
        if record is None or record.link is not link:
            return False
        if output.stop_reason == PAUSED:
            output.stop_reason = None
        elif output.finish_reason == FinishReason.ABORT:
            # The verifier has given up on the sequence.  One that this gateway had aborted would not be found above.
            self._fail_over([record], "given_up", died=True)
            return False
        output.request_id = record.request.request_id
        record.claim.heard_at = now
        if output.new_token_ids:
            self._observer.on_tokens(record, len(output.new_token_ids), now)
            record.cut = None
            self._sequences.grown(record, output.new_token_ids, now)
        if output.finish_reason is not None:
            self._accounts.ended(record.place_id)
            self._leave(record, str(output.finish_reason))
        return True

    def on_said(self, request_id: str, tokens: int, last: bool) -> None:
        """vLLM has put tokens of a sequence into its answer: these are shown and charged.  It aborts at a stop string."""
        record, reason = self._ending.get(request_id) or (self._sequences.get(request_id), "")
        if record is None:
            return
        record.said += tokens
        record.claim.output_tokens += tokens
        self._observer.on_said(tokens)
        if last and reason:
            self._end(record, reason)

    def _leave(self, record: InFlight, reason: str) -> None:
        """It is over at its verifier, and its last tokens are on their way to vLLM."""
        self._sequences.remove(record)
        self._ending[record.request.request_id] = record, reason
        self.gate.look()

    def _end(self, record: InFlight, reason: str) -> None:
        """Forgets a sequence that has ended, and settles its claim."""
        self._sequences.remove(record)
        self._ending.pop(record.request.request_id, None)
        self._observer.on_finished(record, reason)
        self._share(record)
        record.claim.ended()
        if not record.claim.running:
            self.gate.settle(record.claim)
            self.gate.abandon(record.claim)
        self.gate.look()

    def _share(self, record: InFlight) -> None:
        """Gives the text of a sequence that has ended to the other verifiers, for look-ups."""
        asked, request = record.claim.asked, record.request
        others = [each for each in self.ready_links if each is not record.link and each.welcome and each.welcome.looks_up]
        if others and asked.learn and record.emitted:
            before = list((request.prompt_token_ids or ())[-SHARED_SUFFIX:])
            said = Said(asked.salted(request.cache_salt).tenant, before, record.emitted)
            for link in others:
                link.share(said)

    def _fail(self, records: Sequence[InFlight], error: type[Unavailable]) -> None:
        if not records:
            return
        for record in records:
            self._end(record, "poisoned" if error is Poisoned else "lost")
        self.on_failed([record.request.request_id for record in records], error())

    def fail_all(self, error: type[Unavailable]) -> None:
        """Fails every request with `error`, here and at the verifiers."""
        for link in self.ready_links:
            link.abort([record.place_id for record in self._sequences.at(link)])
        self.gate.fail_all(error)
        self._fail(self.sequences, error)

    # New sequences

    def _room(self) -> float:
        """How many more sequences the routable verifiers can take."""
        return sum(self._rooms.left(link.member.id, self._sequences.placed(link.member.id)) for link in self.routable())

    # Moving sequences: cut, place

    def _fail_over(self, records: Sequence[InFlight], cause: str, died: bool = False) -> None:
        """Continues sequences that have lost their verifier, now or when there is another.

        Each may be the reason if the verifier has `died`; after too many such losses, a sequence fails as `Poisoned`.
        """
        for record in records:
            # A sequence that had not reached the engine did not cause the loss: verifiers also die together.
            if died and record.taken and record.link is not None:
                incarnation = record.link.member.incarnation
                # A verifier that has given up on a sequence is not lost, so each such event counts by itself.
                record.lost.add(f"{incarnation}~{record.places}" if cause == "given_up" else incarnation)
        poisoned = [record for record in records if len(record.lost) >= POISON_AFTER]
        if poisoned:
            logger.error("%d sequences refused: %d verifiers were lost under each", len(poisoned), POISON_AFTER)
        self._fail(poisoned, Poisoned)
        left = [record for record in records if record in self._sequences]
        cut = Cut("failover", cause, time.monotonic())
        for record in left:
            self._sequences.cut(record, cut)
        for record in left:
            if not self._place(record):
                loop = asyncio.get_running_loop()
                record.giving_up = loop.call_later(self.gate.wait_s, self._fail, [record], VerifierLost)

    def migrate(self, request_ids: Sequence[str], target: str | None, cause: str) -> int:
        """Moves running sequences to the verifier `target`, or to one that routing chooses.  Returns how many moved.

        Tokens so far are kept; further ones of the old verifier are discarded.  A sequence that cannot be moved (unknown,
        waiting, already there, or taken by no verifier) stays as it is.
        """
        moved = 0
        for request_id in request_ids:
            record = self._sequences.get(request_id)
            if record is None or record.link is None:
                continue
            old = record.link
            chosen = self._choose(record, without=old, target=target)
            if chosen is None:
                continue
            old.abort([record.place_id])
            self._sequences.cut(record, Cut("migration", cause, time.monotonic()))
            self._give(record, chosen)
            moved += 1
        if moved:
            logger.info("%d sequences migrated (%s)", moved, cause)
        return moved

    def hold_batches(self, most: int) -> None:
        """Limits batches to `most` sequences at the verifiers: takes the latest away, or lets the earliest held ones go on."""
        running = [record for record in self._sequences.batched if record.link is not None]
        for record in running[max(most, 0) :]:
            assert record.link is not None
            record.link.abort([record.place_id])
            self._sequences.cut(record, None)
            record.held = True
        if len(running) < most:
            for record in [record for record in self._sequences.batched if record.held][: most - len(running)]:
                record.held = False
                self._place(record)

    def _place_waiting(self) -> None:
        for record in self._sequences.waiting():
            self._place(record)

    def _place(self, record: InFlight) -> bool:
        """Gives a sequence without a verifier to one.  False if no verifier takes it."""
        link = self._choose(record)
        if link is None:
            return False
        self._give(record, link)
        return True

    def _choose(self, record: InFlight, without: VerifierLink | None = None, target: str | None = None) -> VerifierLink | None:
        links = {
            link.member.id: link
            for link in self.routable()
            if link is not without and target in (None, link.member.id) and _takes(link, record)
        }
        chosen = self.choosing.choose(record.ask, {each: self._sequences.load(each) for each in links})
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
        asked = record.claim.asked
        link.add(
            record.request, record.place_id, record.emitted, record.noise_seed, asked if asked != RequestOptions() else None
        )
        self._accounts.placed(record, link)
        self._sequences.put(record, link)
        record.claim.verifier = link.member.id
        self.choosing.given(link.member.id)
        if record.cut is not None:
            self._observer.on_moved(record, record.cut)

    # EngineCoreClient: requests

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        for link in self.ready_links:
            if link.welcome is not None:
                return tuple(link.welcome.supported_tasks)
        raise NoVerifier

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Routes and submits a sequence.  Raises `NoVerifier`, or `VLLMValidationError` if the request cannot be encoded."""
        arrived = time.monotonic() - max(0.0, time.time() - request.arrival_time)
        claim = current_claim()
        record = InFlight(request, None, arrived, claim=claim)
        if not record.batched:
            self.on_interactive()
        if claim.inquiry is not None:
            record.told = claim.inquiry.follow(record)
        try:
            if not self._place(record):
                raise NoVerifier
        except OverflowError:
            raise VLLMValidationError("A number in the request is out of range.") from None
        claim.began(len(request.prompt_token_ids or ()), record.placed_at)
        self.gate.placed(claim)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Ends sequences.  Never suspends, so that it also works in a task that is being cancelled."""
        for request_id in request_ids:
            if request_id in self._ending:
                self._end(*self._ending[request_id])
        known = [self._sequences.get(request_id) for request_id in dict.fromkeys(request_ids)]
        self._abort([record for record in known if record is not None], self._end)

    def finish(self, records: Sequence[InFlight]) -> None:
        """Ends sequences as aborted, after all tokens that have arrived for them."""
        self._abort(records, self._leave)
        ended = [EngineCoreOutput(each.request.request_id, [], finish_reason=FinishReason.ABORT) for each in records]
        self._outputs.put_nowait(EngineCoreOutputs(outputs=ended))

    def _abort(self, records: Sequence[InFlight], over: Callable[[InFlight, str], None]) -> None:
        by_link: dict[int, tuple[VerifierLink, list[str]]] = {}
        for record in records:
            if record.link is not None:
                by_link.setdefault(id(record.link), (record.link, []))[1].append(record.place_id)
            over(record, "aborted")
        for link, ids in by_link.values():
            link.abort(ids)

    # EngineCoreClient: utility methods, called at every verifier

    async def _everywhere(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(link.call(method, *args) for link in self.ready_links))

    async def add_lora_async(self, lora_request: Any) -> bool:
        # A verifier that joins later needs no call: verifiers also load an adapter when its first request comes.
        return all(await self._everywhere("add_lora", lora_request))

    async def remove_lora_async(self, lora_id: int) -> bool:
        return all(await self._everywhere("remove_lora", lora_id))

    async def reset_prefix_cache_async(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.choosing.emptied(self.links)
        return all(await self._everywhere("reset_prefix_cache", reset_running_requests, reset_connector))

    def dp_engines_running(self) -> bool:
        return bool(self._sequences)

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout
        self._stopping = True
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
        for link in list(self.links.values()):
            link.close()
        self.gate.fail_all(ShuttingDown)
        self._fail(self.sequences, ShuttingDown)


def _tell_of_failure(pause: asyncio.Future[Any]) -> None:
    if not pause.cancelled() and (error := pause.exception()):
        logger.error("a verifier that became ready could not be paused: %s", error)


def _takes(link: VerifierLink, record: InFlight) -> bool:
    return link.welcome is not None and record.fits(link.welcome.max_model_len)
