"""The fleet's verifiers as this gateway sees them: follows the directory, keeps the links, knows which take new requests.

Runs in the gateway's event loop.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from backend.engine.client import EngineCodec
from backend.fleet import FleetSnapshot, Member, VerifierStats
from backend.fleet.speed import RESPONSE_TOKENS
from backend.transport.sockets import Wire
from backend.wire.engine import GATEWAY_LEASE_S
from gateway.fleet.directory import Directory, follow
from gateway.fleet.engine_link import Cause, LinkListener, VerifierLink
from gateway.fleet.pauses import Pauses
from gateway.fleet.sequences import InFlight
from gateway.fleet.weights import WeightsInForce
from gateway.http.errors import NoVerifier

logger = logging.getLogger(__name__)

FRESH_S = 1.5
"""Seconds after its last message in which a verifier counts as alive, whatever the directory reports.  Counters come four
times a second."""
HOLD_S = 10.0
"""Seconds that new requests wait after the last verifier was lost.  One that was only stopped or starved soon comes back."""


class Verifiers(LinkListener):
    """The links, and what decides which of them get requests: the members' states, weights and pauses.

    It calls `on_welcome(link)` when a verifier has become usable.
    """

    def __init__(self, directory: Directory, wire: Wire, patience: float = 1.0) -> None:
        """`patience`: how many times as long as a gateway it bears a verifier's silence."""
        self.gateway_id = f"gateway-{uuid.uuid4().hex[:8]}"
        self.directory = directory
        self.snapshot: FleetSnapshot | None = None
        """The directory's last answer."""
        self.answered_at = 0.0
        """When it came (monotonic seconds)."""
        self.links: dict[str, VerifierLink] = {}
        self.weights = WeightsInForce()
        self.pauses = Pauses()
        self.standing: set[str] = set()
        """Incarnations of verifiers that were paused from here, and whose pause was not ended from here."""
        self.on_welcome: Callable[[VerifierLink], None] = lambda link: None
        self._wire, self._patience = wire, patience
        self._poller: asyncio.Task[None] | None = None
        # When a verifier was last routable (monotonic seconds), and the event that new requests wait for while none is.
        self._served_at = float("-inf")
        self._arrival = asyncio.Event()

    def start(self) -> None:
        """Begins to follow the directory; requires a running event loop."""
        if self._poller is None:
            self._poller = asyncio.create_task(follow(self.directory, self.look), name="fleet-directory")

    def close(self) -> None:
        """Drops all links."""
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
        for link in list(self.links.values()):
            link.close()

    @property
    def ready_links(self) -> list[VerifierLink]:
        """Verifiers with a working connection, draining ones included."""
        return [link for link in self.links.values() if link.state == "ready"]

    def stats(self) -> list[VerifierStats]:
        """The last counters of every connected verifier, as far as received."""
        return [link.stats for link in self.ready_links if link.stats is not None]

    @property
    def response_tokens(self) -> float:
        """Mean tokens of a response, as measured by the verifiers."""
        lengths = [stats.response_tokens for stats in self.stats()]
        return sum(lengths) / len(lengths) if lengths else RESPONSE_TOKENS

    def routable_links(self) -> list[VerifierLink]:
        """The verifiers for new requests: with the newest weights, not draining, and awake unless all sleep."""
        ready = [link for link in self.ready_links if link.member.state == "ready" and not self.weights.is_behind(link)]
        running = [link for link in ready if not self.pauses.should_pause(link.member.id)]
        awake = [link for link in running if link.stats is None or not link.stats.paused]
        return awake or ready

    def all_paused(self) -> bool:
        return bool(ready := self.ready_links) and all(self.pauses.should_pause(link.member.id) for link in ready)

    async def everywhere(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every verifier's engine core.  Raises `UtilityError` when one fails."""
        return await asyncio.gather(*(link.call(method, *args) for link in self.ready_links))

    def share(self, record: InFlight) -> None:
        """Gives the text of a sequence that has ended to the other verifiers, for look-ups."""
        others = [link for link in self.ready_links if link is not record.link and link.welcome and link.welcome.looks_up]
        if others and record.emitted and record.claim.options.learn:
            frames = EngineCodec.share(record.output)
            for link in others:
                link.send(frames)

    async def wait_routable(self, patience_s: float) -> None:
        """Returns when there is a verifier for a new request.  Raises `NoVerifier` if the last one was lost long ago.

        Long ago is more than `HOLD_S` or `patience_s`, whichever is less.
        """
        until = self._served_at + min(patience_s, HOLD_S)
        while not self.routable_links():
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._arrival.wait()
            except TimeoutError:
                raise NoVerifier from None

    def look(self, snapshot: FleetSnapshot) -> None:
        """Connects to new verifiers and drops lost ones.

        One that is only missing keeps its link while it answers: a coordinator that has just restarted knows no members.
        """
        if snapshot is not self.snapshot:
            self.snapshot, self.answered_at = snapshot, time.monotonic()
        members = [view.member for view in snapshot.members if view.member.kind == "verifier"]
        known = {member.id for member in members}
        for link in [each for each in self.links.values() if each.state != "ready" and each.member.id not in known]:
            link.close()
        for member in members:
            current = self.links.get(member.id)
            if current is not None and member.incarnation != current.member.incarnation:
                current.close("restarted", died=True)
            elif current is not None and member.state == "lost":
                # A verifier that answers is not lost: only the connection between coordinator and verifier is broken.
                if not current.answers(FRESH_S * self._patience):
                    current.close("declared_lost", died=True)
            elif current is not None:
                current.member = member
            if member.id not in self.links and member.state == "ready":
                self._connect(member)
        if self.routable_links():
            self._served_at = time.monotonic()
            self._tell_arrival()

    def _connect(self, member: Member) -> None:
        try:
            link = VerifierLink(member, self._wire, self.gateway_id, self, GATEWAY_LEASE_S * self._patience)
        except (ValueError, OSError) as error:
            logger.error("cannot connect to verifier %s: %s", member.id, type(error).__name__)
            return
        self.links[member.id] = link
        link.start()

    def _tell_arrival(self) -> None:
        self._arrival.set()
        self._arrival = asyncio.Event()

    def on_ready(self, link: VerifierLink) -> None:
        logger.info("verifier %s is ready", link.member.id)
        if self.pauses.should_pause(link.member.id):
            # Sent before any request is.
            self.standing.add(link.member.incarnation)
            link.call("pause", "keep", False).add_done_callback(_tell_of_failure)
        elif link.member.incarnation in self.standing:
            # It was away when the pause ended.
            self.standing.discard(link.member.incarnation)
            link.call("wake_up").add_done_callback(_tell_of_failure)
        self.weights.compare(link)
        self.on_welcome(link)
        self._tell_arrival()

    def on_lost(self, link: VerifierLink, cause: Cause, died: bool) -> None:
        self.weights.gone(link)
        if link.welcome is not None:
            self._served_at = time.monotonic()
        if self.links.get(link.member.id) is link:
            del self.links[link.member.id]


def _tell_of_failure(pause: asyncio.Future[Any]) -> None:
    if not pause.cancelled() and (error := pause.exception()):
        logger.error("a verifier that became ready could not be paused, or go on: %s", error)
