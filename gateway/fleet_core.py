"""vLLM's `EngineCoreClient` over the fleet: requests go to the verifier that routing chose, outputs come back merged.

Owns the links to the verifiers, the directory's last answer, and a record of every request in flight with all its tokens,
so that a request can be moved to another verifier.  Runs in the gateway's event loop; no threads, no locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from backend.fleet import FleetSnapshot, Member, VerifierStats
from backend.routing import Ask, Candidate, LeastLoaded, Router
from backend.speeds import SpeedBook
from backend.transport.sockets import Wire
from gateway.directory import Directory
from gateway.engine_link import VerifierLink
from gateway.errors import NoVerifier, Unavailable, VerifierLost
from gateway.session import current_session

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5


@dataclass
class InFlight:
    """One sequence at a verifier: enough to continue it elsewhere, and to time it."""

    request: EngineCoreRequest
    link: VerifierLink
    arrived: float
    """Monotonic seconds, like the two below."""
    first_token: float | None = None
    last_token: float | None = None
    emitted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_token_ids or ()) + len(self.emitted)


class TrafficObserver(Protocol):
    """Told of every sequence's progress; `gateway.metrics` implements it."""

    def on_tokens(self, sequence: InFlight, count: int, now: float) -> None:
        """`count` tokens arrived in one chunk; called before `sequence` takes them in."""
        ...

    def on_finished(self, sequence: InFlight, reason: str) -> None:
        """The sequence ended: `stop`, `length`, ..., `aborted` by us, or `lost` with its verifier."""
        ...


class FleetCore(EngineCoreClient):
    """The fleet as vLLM's front half sees an engine core.

    `on_failed(request_ids, error)` is called when requests end without the client's doing; `on_welcome(link)` when a
    verifier has become usable.
    """

    def __init__(
        self,
        directory: Directory,
        wire: Wire,
        observer: TrafficObserver,
        *,
        router: Router | None = None,
        silence_limit_s: float = 10.0,
        gateway_id: str | None = None,
    ) -> None:
        self.gateway_id = gateway_id or f"gateway-{uuid.uuid4().hex[:8]}"
        self.snapshot: FleetSnapshot | None = None
        self.links: dict[str, VerifierLink] = {}
        self.on_failed: Callable[[list[str], Unavailable], None] = lambda ids, error: None
        self.on_welcome: Callable[[VerifierLink], None] = lambda link: None
        self.first_ready = asyncio.Event()
        # AsyncLLM asks its engine core whether it is dead; a fleet never is.
        self.resources = SimpleNamespace(engine_dead=False)
        self._directory = directory
        self._wire = wire
        self._observer = observer
        self._router: Router = router or LeastLoaded()
        self._speeds = SpeedBook()
        self._silence_limit_s = silence_limit_s
        self._in_flight: dict[str, InFlight] = {}
        self._routed: dict[str, int] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._poller: asyncio.Task[None] | None = None

    # The fleet's membership

    def start(self) -> None:
        """Begins to follow the directory; needs the running event loop."""
        if self._poller is None:
            self._poller = asyncio.create_task(self._follow_directory(), name="fleet-directory")

    @property
    def ready_links(self) -> list[VerifierLink]:
        """The verifiers that answer, draining ones included."""
        return [link for link in self.links.values() if link.state == "ready"]

    @property
    def in_flight(self) -> int:
        """Sequences at verifiers now."""
        return len(self._in_flight)

    def stats(self) -> list[VerifierStats]:
        """The last counters of every connected verifier that has sent some."""
        return [link.stats for link in self.ready_links if link.stats is not None]

    def routable(self) -> list[VerifierLink]:
        """The verifiers that take new requests."""
        return [link for link in self.ready_links if link.member.state == "ready"]

    async def _follow_directory(self) -> None:
        failing = False
        while True:
            try:
                self.snapshot = await self._directory.snapshot()
                failing = False
            except Exception as error:
                # Serving goes on with the last answer; this loop must outlive any directory.
                if not failing:
                    logger.warning("the fleet directory does not answer: %s", type(error).__name__)
                failing = True
            else:
                self._apply([view.member for view in self.snapshot.members if view.member.kind == "verifier"])
            await asyncio.sleep(POLL_INTERVAL_S)

    def _apply(self, members: Iterable[Member]) -> None:
        """Connects to new verifiers, drops lost ones.  One missing from the directory keeps its link while it answers:
        a coordinator that has just restarted knows nobody yet."""
        members = list(members)
        known = {member.id for member in members}
        for link in [each for each in self.links.values() if each.state != "ready" and each.member.id not in known]:
            link.close("unknown to the directory")
        for member in members:
            current = self.links.get(member.id)
            if current is not None and (member.state == "lost" or member.incarnation != current.member.incarnation):
                current.close("the directory says so")
                current = None
            if current is not None:
                current.member = member
            elif member.state == "ready":
                self._connect(member)

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
        self.on_welcome(link)
        self.first_ready.set()

    def on_outputs(self, link: VerifierLink, outputs: EngineCoreOutputs) -> None:
        now = time.monotonic()
        kept = [output for output in outputs.outputs if self._take(link, output, now)]
        if kept:
            outputs.outputs = kept
            self._outputs.put_nowait(outputs)

    def on_stats(self, link: VerifierLink, stats: VerifierStats) -> None:
        welcome = link.welcome
        if welcome is not None:
            self._speeds.observe(stats, welcome.num_kv_blocks * welcome.block_size)

    def on_lost(self, link: VerifierLink, reason: str) -> None:
        if self.links.get(link.member.id) is link:
            del self.links[link.member.id]
            self._speeds.forget(link.member.id)
            self._router.forget(link.member.id)
        orphans = [request_id for request_id, record in self._in_flight.items() if record.link is link]
        level = logging.WARNING if orphans else logging.INFO
        logger.log(level, "verifier %s gone (%s) with %d sequences", link.member.id, reason, len(orphans))
        self._fail(orphans, VerifierLost)

    def _take(self, link: VerifierLink, output: EngineCoreOutput, now: float) -> bool:
        """Books one output; False when nobody may see it."""
        record = self._in_flight.get(output.request_id)
        if record is None or record.link is not link:
            return False
        if output.finish_reason == FinishReason.ABORT:
            # Not at our request, or the record would be gone: the verifier has given up on us.
            self._fail([output.request_id], VerifierLost)
            return False
        if output.new_token_ids:
            self._observer.on_tokens(record, len(output.new_token_ids), now)
            record.first_token = record.first_token or now
            record.last_token = now
            record.emitted.extend(output.new_token_ids)
        if output.finish_reason is not None:
            del self._in_flight[output.request_id]
            self._observer.on_finished(record, str(output.finish_reason))
        return True

    def _fail(self, request_ids: Sequence[str], error: type[Unavailable]) -> None:
        if not request_ids:
            return
        for request_id in request_ids:
            self._observer.on_finished(self._in_flight.pop(request_id), "lost")
        self.on_failed(list(request_ids), error())

    def fail_all(self, error: type[Unavailable]) -> None:
        """Ends every request, here and at the verifiers."""
        by_link: dict[str, list[str]] = {}
        for request_id, record in self._in_flight.items():
            by_link.setdefault(record.link.member.id, []).append(request_id)
        for verifier_id, request_ids in by_link.items():
            if verifier_id in self.links:
                self.links[verifier_id].abort(request_ids)
            self._fail(request_ids, error)

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
        routable = {link.member.id: link for link in self.routable()}
        chosen = self._router.choose(self._ask(request), self._candidates(routable))
        if chosen is None:
            raise NoVerifier
        link = routable[chosen]
        arrived = time.monotonic() - max(0.0, time.time() - request.arrival_time)
        try:
            link.add(request)
        except OverflowError:
            raise VLLMValidationError("A number in the request is out of range.") from None
        self._in_flight[request.request_id] = InFlight(request, link, arrived)
        self._routed[chosen] = self._routed.get(chosen, 0) + 1

    def _ask(self, request: EngineCoreRequest) -> Ask:
        prompt = request.prompt_token_ids or ()
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        return Ask(len(prompt), prompt, f"{adapter}/{request.cache_salt or ''}", current_session())

    def _candidates(self, routable: Iterable[str]) -> list[Candidate]:
        tokens = dict.fromkeys(routable, 0)
        requests = dict.fromkeys(tokens, 0)
        for record in self._in_flight.values():
            verifier_id = record.link.member.id
            if verifier_id in tokens:
                tokens[verifier_id] += record.tokens
                requests[verifier_id] += 1
        measured = self._speeds.measured
        return [Candidate(each, tokens[each], requests[each], self._routed.get(each, 0), measured(each)) for each in tokens]

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Never suspends, so that it also works in a task that is being cancelled."""
        by_link: dict[int, tuple[VerifierLink, list[str]]] = {}
        for request_id in request_ids:
            record = self._in_flight.pop(request_id, None)
            if record is not None:
                by_link.setdefault(id(record.link), (record.link, []))[1].append(request_id)
                self._observer.on_finished(record, "aborted")
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
        return all(await self._everywhere("reset_prefix_cache", reset_running_requests, reset_connector))

    def dp_engines_running(self) -> bool:
        return bool(self._in_flight)

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
        for link in list(self.links.values()):
            link.close("shutting down")
