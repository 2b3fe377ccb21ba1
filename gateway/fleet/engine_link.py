"""One connection from this gateway to one verifier: the client's side of `backend.wire.engine`.

Owns the socket and three tasks (receive, ping, watch) in the gateway's event loop.  It knows nothing about routing or HTTP, and
passes all messages to a `LinkListener`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from backend.engine.client import EngineCodec, Taken
from backend.engine.front import EngineCoreOutputs, EngineCoreRequest
from backend.fleet import Member, VerifierStats
from backend.fleet.stats import Weights
from backend.transport import Buffer
from backend.transport.aio import AsyncDealer
from backend.transport.sockets import Wire
from backend.wire.engine import ENGINE_WIRE_VERSION, Account, EngineWelcome, Refusal, RequestOptions

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
STALL_S = 2 * PING_INTERVAL_S
"""If the ping loop takes more seconds for a turn, this process was stopped or starved."""
EXCUSE_S = 5 * PING_INTERVAL_S
"""Seconds after such a stall in which a lost connection is not blamed on the verifier."""
LinkState = Literal["connecting", "ready", "lost"]
Cause = Literal["disconnected", "silent", "declared_lost", "restarted", "incompatible", "closed"]
"""Why a link has ended; a word for metrics."""


class UtilityError(Exception):
    """A verifier answered a utility call with a failure, or was lost before it answered."""


class VerifierGone(UtilityError):
    """The verifier was lost before it answered."""


class VerifierForgot(UtilityError):
    """The verifier has forgotten this gateway; whether it did what was asked is not known."""


class LinkListener(Protocol):
    """Receives what a link hears from its verifier.  Called in the event loop; must not block."""

    def on_ready(self, link: VerifierLink) -> None: ...

    def on_taken(self, link: VerifierLink, place_id: str) -> None:
        """The verifier's engine has taken in this sequence."""
        ...

    def on_outputs(self, link: VerifierLink, outputs: EngineCoreOutputs) -> None: ...

    def on_accounts(self, link: VerifierLink, accounts: Sequence[Account]) -> None:
        """Speculation statistics of sequences that have ended at the verifier."""
        ...

    def on_stats(self, link: VerifierLink, stats: VerifierStats) -> None: ...

    def on_forgotten(self, link: VerifierLink) -> None:
        """The verifier lives but has forgotten this gateway.  This gateway's sequences there have ended."""
        ...

    def on_lost(self, link: VerifierLink, cause: Cause, died: bool) -> None:
        """The link has ended; `died`: the verifier has probably died or hangs."""
        ...


class VerifierLink:
    """The connection to one incarnation of one verifier.  Once lost it is never used again."""

    def __init__(self, member: Member, wire: Wire, gateway_id: str, listener: LinkListener, silence_limit_s: float) -> None:
        self.member = member
        self.state: LinkState = "connecting"
        self.welcome: EngineWelcome | None = None
        self.stats: VerifierStats | None = None
        self._listener = listener
        self._silence_limit_s = silence_limit_s
        self._gateway_id = gateway_id
        self._dealer = AsyncDealer(wire, wire.route(member), member.server_key)
        self._codec = EngineCodec()
        self._heard_at = self._awake_at = time.monotonic()
        self._excused_until = 0.0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to greet and to listen; requires a running event loop."""
        loops = (self._receive_loop(), self._ping_loop(), self._watch())
        self._tasks = [asyncio.create_task(loop, name=f"link-{self.member.id}") for loop in loops]

    def add(
        self, request: EngineCoreRequest, place_id: str, emitted: Sequence[int], options: RequestOptions | None = None
    ) -> None:
        """Submits a sequence that goes on after its `emitted` tokens.  The listener gets outputs under the id `place_id`."""
        self._dealer.send(self._codec.add(request, place_id, emitted, options))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests without further outputs.  Never waits."""
        if request_ids:
            self._dealer.send(self._codec.abort(request_ids))

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends a message that needs no answer, and that is encoded already because other links send it too."""
        self._dealer.send(frames)

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """Calls a method of the verifier's engine core, ahead of all that is sent later; `UtilityError` when it fails."""
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        self._dealer.send(self._codec.call(call_id, method, args))
        return future

    @property
    def weights(self) -> Weights:
        """The weights of the target model that the verifier runs, by its last report."""
        if self.stats is not None:
            return self.stats.weights
        return self.welcome.weights if self.welcome is not None else Weights()

    def answers(self, within_s: float) -> bool:
        """Whether the link is ready and has received something in the last `within_s` seconds."""
        return self.state == "ready" and time.monotonic() - self._heard_at <= within_s

    def close(self, cause: Cause = "closed", *, died: bool = False) -> None:
        """Ends the connection and tells the listener why.  A second call has no effect."""
        if self.state == "lost":
            return
        self.state = "lost"
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._dealer.close()
        self._drop_calls(VerifierGone)
        self._listener.on_lost(self, cause, died)

    def _drop_calls(self, error: type[UtilityError]) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error(f"verifier {self.member.id} went away"))

    async def _receive_loop(self) -> None:
        while self.state != "lost":
            frames = await self._dealer.receive()
            self._heard_at = time.monotonic()
            try:
                self._handle(frames)
            except (msgspec.DecodeError, msgspec.ValidationError, IndexError, UnicodeError) as error:
                logger.warning("verifier %s sent what we cannot read: %s", self.member.id, type(error).__name__)
                self.close("incompatible")

    def _handle(self, frames: list[bytes]) -> None:
        heard = self._codec.hear(frames)
        if isinstance(heard, EngineCoreOutputs):
            if heard.utility_output is not None:
                self._answer(heard)
            if heard.outputs:
                self._listener.on_outputs(self, heard)
        elif isinstance(heard, Taken):
            self._listener.on_taken(self, heard.request_id)
        elif isinstance(heard, list):
            self._listener.on_accounts(self, heard)
        elif isinstance(heard, VerifierStats):
            self.stats = heard
            self._listener.on_stats(self, heard)
        elif isinstance(heard, EngineWelcome):
            self._welcomed(heard)
        elif isinstance(heard, Refusal):
            self._refused(heard)

    def _welcomed(self, welcome: EngineWelcome) -> None:
        if welcome.version != ENGINE_WIRE_VERSION or welcome.incarnation != self.member.incarnation:
            self.close("incompatible")
        elif self.state == "connecting":
            self.welcome = welcome
            self.state = "ready"
            self._listener.on_ready(self)

    def _refused(self, refusal: Refusal) -> None:
        if refusal.reason == "unreadable":
            # Only this one message is lost, and at most the one request in it.
            logger.error("verifier %s could not read a message", self.member.id)
        elif refusal.reason == "incompatible":
            logger.error("verifier %s refused us: %s", self.member.id, refusal.message)
            self.close("incompatible")
        elif self.state == "ready":
            # The verifier has dropped this gateway, or was restarted behind the same address.  More refusals may follow.
            self.state = "connecting"
            self._drop_calls(VerifierForgot)
            self._greet()
            self._listener.on_forgotten(self)

    def _answer(self, outputs: EngineCoreOutputs) -> None:
        answer = outputs.utility_output
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        if answer.failure_message is not None:
            future.set_exception(UtilityError(answer.failure_message))
        else:
            future.set_result(answer.result.result if answer.result is not None else None)

    def _greet(self) -> None:
        self._dealer.send(self._codec.hello(self._gateway_id))

    async def _ping_loop(self) -> None:
        beats = 0
        while self.state != "lost":
            if self.state == "ready":
                beats = 0
                self._dealer.send(self._codec.ping())
            else:
                beats += 1
                if beats & (beats - 1) == 0:
                    # Repeated, because the verifier may have missed the first greeting.  The pauses double, because greetings
                    # pile up while no verifier listens.
                    self._greet()
            await asyncio.sleep(PING_INTERVAL_S)
            now = time.monotonic()
            if self._stalled(now):
                # Messages that the verifier sent during the stall are still unread.
                self._heard_at = now
            self._awake_at = now
            paused = self.stats is not None and self.stats.paused
            if self.state == "ready" and not paused and now - self._heard_at > self._silence_limit_s:
                self.close("silent", died=True)

    def _stalled(self, now: float) -> bool:
        """Whether this process was stopped or starved within `EXCUSE_S`."""
        if now - self._awake_at > STALL_S:
            self._excused_until = now + EXCUSE_S
        return now < self._excused_until

    async def _watch(self) -> None:
        await self._dealer.disconnected()
        self.close("disconnected", died=not self._stalled(time.monotonic()))
