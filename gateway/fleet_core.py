"""vLLM's `EngineCoreClient` over the fleet: requests go to the verifier that routing chose, outputs come back merged.

Owns the links to the verifiers, the directory's last answer, and a record of every request in flight with all its tokens.
With that, failover and migration are one operation: cut the sequence off from one verifier, give it with its tokens to
another, go on with the same stream.  Runs in the gateway's event loop; no threads, no locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

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
from backend.wire.engine import PAUSED, Account, Asked
from gateway.admission.claim import current_claim
from gateway.admission.gate import Gate, Queueing
from gateway.admission.room import Rooms
from gateway.directory import Directory, follow
from gateway.engine_link import DECLARED_LOST, RESTARTED, Loss, VerifierLink
from gateway.errors import NoVerifier, Poisoned, ShuttingDown, Unavailable, VerifierLost
from gateway.in_flight import Cut, InFlight, Sequences, TrafficObserver
from gateway.inquiry import Awaited
from gateway.weights_in_force import WeightsInForce

logger = logging.getLogger(__name__)

FRESH_S = 1.5
"""A verifier heard of so recently lives, whatever the directory says: counters come four times a second."""
HOLD_S = 10.0
"""New requests wait for so long after a verifier was lost: one that was stopped or starved comes back in seconds."""


class FleetCore(EngineCoreClient):
    """The fleet as vLLM's front half sees an engine core.

    `on_failed(request_ids, error)` is called when requests end without the client's doing; `on_welcome(link)` when a
    verifier has become usable; `on_interactive()` before a sequence that is no batch's is given to a verifier.
    """

    def __init__(
        self,
        directory: Directory,
        wire: Wire,
        observer: TrafficObserver,
        *,
        router: Router | None = None,
        silence_limit_s: float = 10.0,
        poison_after: int = 2,
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
        # AsyncLLM asks its engine core whether it is dead; a fleet never is.
        self.resources = SimpleNamespace(engine_dead=False)
        self.directory = directory
        self._wire = wire
        self._observer = observer
        self.choosing = Choosing(router or LeastLoaded())
        self._silence_limit_s = silence_limit_s
        self._poison_after = poison_after
        self._stopping = False
        self.weights = WeightsInForce()
        self.draining = False
        """No new requests are taken."""
        # When a verifier was last there for a new request; and what those wait for that come while none is.
        self._served_at = float("-inf")
        self._arrival = asyncio.Event()
        self._sequences = Sequences()
        # Over at their verifiers, for these reasons, while vLLM has yet to put their last tokens into answers.
        self._ending: dict[str, tuple[InFlight, str]] = {}
        self._rooms = Rooms(slots)
        self.gate = Gate(self._room, queueing or Queueing())
        # What still runs at a verifier whose link was lost, should it come back: by its id and incarnation.
        self._strays: dict[tuple[str, str], list[str]] = {}
        self._accounts = Awaited()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._poller: asyncio.Task[None] | None = None

    # The fleet's membership

    def start(self) -> None:
        """Begins to follow the directory; needs the running event loop."""
        if self._poller is None:
            self._poller = asyncio.create_task(follow(self.directory, self._look), name="fleet-directory")

    @property
    def ready_links(self) -> list[VerifierLink]:
        """The verifiers that answer, draining ones included."""
        return [link for link in self.links.values() if link.state == "ready"]

    @property
    def in_flight(self) -> int:
        """Sequences being served, those that wait for a verifier included."""
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
        """Whether a sequence that is no batch's has no token yet."""
        return self._sequences.expecting

    @property
    def held(self) -> int:
        """Sequences of batches that have given way."""
        return sum(record.held for record in self._sequences.batched)

    @property
    def sequences(self) -> list[InFlight]:
        """Every sequence being served."""
        return list(self._sequences)

    def requests_at(self, verifier_id: str) -> list[str]:
        """The ids of this gateway's sequences at a verifier, as `migrate` takes them."""
        link = self.links.get(verifier_id)
        return [record.request.request_id for record in self._sequences.at(link)] if link is not None else []

    def stats(self) -> list[VerifierStats]:
        """The last counters of every connected verifier that has sent some."""
        return [link.stats for link in self.ready_links if link.stats is not None]

    @property
    def response_tokens(self) -> float:
        """Mean length of a response, as verifiers have measured it."""
        lengths = [stats.response_tokens for stats in self.stats()]
        return sum(lengths) / len(lengths) if lengths else RESPONSE_TOKENS

    def routable(self) -> list[VerifierLink]:
        """The verifiers that take new requests: those with the newest weights; those that sleep only while all do."""
        ready = [link for link in self.ready_links if link.member.state == "ready" and not self.weights.is_behind(link)]
        awake = [link for link in ready if link.stats is None or not link.stats.paused]
        return awake or ready

    async def until_routable(self) -> None:
        """Returns when there is a verifier for a new request: at once, or in a moment where one was lost a moment ago.

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
        """Waits until the request at hand may be submitted.  Raises `NoVerifier`, or `Overloaded` when too many wait."""
        if not self.routable():
            raise NoVerifier
        await self.gate.enter(current_claim())

    def abandon(self) -> None:
        """The request at hand will not be submitted, or not all of it."""
        self.gate.abandon(current_claim())

    def _tell_arrival(self) -> None:
        self._arrival.set()
        self._arrival = asyncio.Event()

    def _look(self, snapshot: FleetSnapshot) -> None:
        self.snapshot = snapshot
        self._apply([view.member for view in snapshot.members if view.member.kind == "verifier"])
        for view in snapshot.members:
            # What nobody else takes stays, and is tried again.
            if view.drain is not None and view.drain.migrate:
                self.migrate(self.requests_at(view.member.id), None, "drain")

    def _apply(self, members: Iterable[Member]) -> None:
        """Connects to new verifiers, drops lost ones.  One missing from the directory keeps its link while it answers:
        a coordinator that has just restarted knows nobody yet."""
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
                    # The coordinator has lost sight of it, or it of the coordinator.
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
            link = VerifierLink(member, self._wire, self.gateway_id, self, self._silence_limit_s)
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
        self.weights.compare(link)
        for record in self._sequences:
            # It was stopped or starved, and nothing has killed it.
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
        """Books one output; False when nobody may see it."""
        record = self._sequences.running_as(output.request_id)
        if record is None or record.link is not link:
            return False
        if output.stop_reason == PAUSED:
            output.stop_reason = None
        elif output.finish_reason == FinishReason.ABORT:
            # Not at our request, or it would have no place: the verifier has given up on it.
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
        """It is over."""
        self._sequences.remove(record)
        self._ending.pop(record.request.request_id, None)
        self._observer.on_finished(record, reason)
        record.claim.ended()
        if not record.claim.running:
            self.gate.settle(record.claim)
            self.gate.abandon(record.claim)
        self.gate.look()

    def _fail(self, records: Sequence[InFlight], error: type[Unavailable]) -> None:
        if not records:
            return
        for record in records:
            self._end(record, "poisoned" if error is Poisoned else "lost")
        self.on_failed([record.request.request_id for record in records], error())

    def fail_all(self, error: type[Unavailable]) -> None:
        """Ends every request, here and at the verifiers."""
        for link in self.ready_links:
            link.abort([record.place_id for record in self._sequences.at(link)])
        self.gate.fail_all(error)
        self._fail(self.sequences, error)

    # New sequences

    def _room(self) -> float:
        """How many more sequences the verifiers can run."""
        return sum(self._rooms.left(link.member.id, self._sequences.placed(link.member.id)) for link in self.routable())

    # Moving sequences: cut, place

    def _fail_over(self, records: Sequence[InFlight], cause: str, died: bool = False) -> None:
        """These have lost their verifier.  They go on at another, wait for one, or are refused as the likely reason."""
        for record in records:
            # One that had not come as far as the engine has nothing to do with it: verifiers also die together.
            if died and record.taken and record.link is not None:
                incarnation = record.link.member.incarnation
                # A verifier that gives up is not lost; it counts every time.
                record.lost.add(f"{incarnation}~{record.places}" if cause == "given_up" else incarnation)
        poisoned = [record for record in records if len(record.lost) >= self._poison_after]
        if poisoned:
            logger.error("%d sequences refused: %d verifiers were lost under each", len(poisoned), self._poison_after)
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
        """Moves running sequences to the verifier `target`, or to whichever routing chooses; returns how many moved.

        What they have emitted is kept, what the old verifier still emits is discarded.  A sequence that cannot be moved
        (unknown, waiting, already there, no verifier that takes it) stays as it is.
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
        """Lets batches have so many sequences at the verifiers: takes the latest away, or has the earliest go on."""
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
        """Gives a sequence without a verifier to one; False when none takes it."""
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
        told = record.told
        asked = told.asked if told is not None else None
        if not record.claim.learn:
            asked = msgspec.structs.replace(asked or Asked(), learn=False)
        link.add(record.request, record.place_id, record.emitted, record.noise_seed, asked)
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
        """Routes and submits; raises `NoVerifier` when nobody can take it, `VLLMValidationError` when it does not encode."""
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
        """Never suspends, so that it also works in a task that is being cancelled."""
        for request_id in request_ids:
            if request_id in self._ending:
                self._end(*self._ending[request_id])
        known = [self._sequences.get(request_id) for request_id in dict.fromkeys(request_ids)]
        self._abort([record for record in known if record is not None], self._end)

    def finish(self, records: Sequence[InFlight]) -> None:
        """Ends sequences as aborted, behind every token that has come for them."""
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

    # EngineCoreClient: utilities, asked of every verifier

    async def _everywhere(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(link.call(method, *args) for link in self.ready_links))

    async def add_lora_async(self, lora_request: Any) -> bool:
        # Verifiers also load an adapter when its first request comes: one that joins later needs no call.
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


def _takes(link: VerifierLink, record: InFlight) -> bool:
    return link.welcome is not None and record.fits(link.welcome.max_model_len)
