"""One connection from this gateway to one verifier: `backend.engine_wire`, spoken by the client.

Owns the socket and three tasks (receive, ping, watch) in the gateway's event loop.  It knows nothing of routing or HTTP;
what it hears it tells a `LinkListener`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import vllm
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from backend.engine_wire import (
    ABORT,
    ADD,
    ENGINE_WIRE_VERSION,
    HELLO,
    OUTPUTS,
    PING,
    REFUSED,
    STATS,
    UTILITY,
    WELCOME,
    EngineHello,
    EngineWelcome,
)
from backend.fleet import Member, VerifierStats
from backend.transport.aio import AsyncDealer
from backend.transport.sockets import Wire

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
LinkState = Literal["connecting", "ready", "lost"]


class UtilityError(Exception):
    """A verifier answered a utility call with a failure, or went away before it answered."""


class LinkListener(Protocol):
    """What becomes of the things a link hears.  Called in the event loop; must not block."""

    def on_ready(self, link: VerifierLink) -> None: ...

    def on_outputs(self, link: VerifierLink, outputs: EngineCoreOutputs) -> None: ...

    def on_stats(self, link: VerifierLink, stats: VerifierStats) -> None: ...

    def on_lost(self, link: VerifierLink, reason: str) -> None: ...


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
        # Another identity per connection: the verifier must not take us for the one before.
        identity = f"{gateway_id}/{uuid.uuid4().hex[:8]}".encode()
        self._dealer = AsyncDealer(wire, member.address, identity, member.server_key)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._heard_at = time.monotonic()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Says hello and begins to listen; needs the running event loop."""
        loops = (self._receive_loop(), self._ping_loop(), self._watch())
        self._tasks = [asyncio.create_task(loop, name=f"link-{self.member.id}") for loop in loops]

    def add(self, request: EngineCoreRequest) -> None:
        """Submits a request; its outputs come to the listener."""
        self._dealer.send([ADD, *self._encoder.encode(request)])

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests without further outputs.  Never waits."""
        self._dealer.send([ABORT, msgspec.msgpack.encode(list(request_ids))])

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the verifier's engine core; raises `UtilityError` when it fails."""
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._dealer.send([UTILITY, *self._encoder.encode([call_id, method, list(args)])])
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def close(self, reason: str) -> None:
        """Ends the connection, telling the listener why; does nothing the second time."""
        if self.state == "lost":
            return
        self.state = "lost"
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._dealer.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(UtilityError(f"verifier {self.member.id} went away"))
        self._listener.on_lost(self, reason)

    async def _receive_loop(self) -> None:
        while self.state != "lost":
            kind, *frames = await self._dealer.receive()
            self._heard_at = time.monotonic()
            try:
                self._handle(bytes(kind), frames)
            except (msgspec.DecodeError, msgspec.ValidationError, IndexError) as error:
                logger.warning("verifier %s sent what we cannot read: %s", self.member.id, type(error).__name__)
                self.close("spoke another language")

    def _handle(self, kind: bytes, frames: list[memoryview]) -> None:
        if kind == OUTPUTS:
            outputs: EngineCoreOutputs = self._decoder.decode(frames)
            if outputs.utility_output is not None:
                self._answer(outputs)
            if outputs.outputs:
                self._listener.on_outputs(self, outputs)
        elif kind == STATS:
            self.stats = msgspec.msgpack.decode(frames[0], type=VerifierStats)
            self._listener.on_stats(self, self.stats)
        elif kind == WELCOME:
            self._welcomed(msgspec.msgpack.decode(frames[0], type=EngineWelcome))
        elif kind == REFUSED:
            logger.error("verifier %s refused us: %s", self.member.id, bytes(frames[0]).decode(errors="replace"))
            self.close("refused")
        elif kind != PING:
            logger.warning("verifier %s sent an unknown frame kind", self.member.id)

    def _welcomed(self, welcome: EngineWelcome) -> None:
        if welcome.version != ENGINE_WIRE_VERSION or welcome.incarnation != self.member.incarnation:
            self.close("another incarnation or version answered")
        elif self.welcome is None:
            self.welcome = welcome
            self.state = "ready"
            self._listener.on_ready(self)

    def _answer(self, outputs: EngineCoreOutputs) -> None:
        answer = outputs.utility_output
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        if answer.failure_message is not None:
            future.set_exception(UtilityError(answer.failure_message))
        else:
            future.set_result(answer.result.result if answer.result is not None else None)

    async def _ping_loop(self) -> None:
        hello = msgspec.msgpack.encode(EngineHello(ENGINE_WIRE_VERSION, vllm.__version__, self._gateway_id))
        beats = 0
        while self.state != "lost":
            beats += 1
            if self.state == "ready":
                self._dealer.send([PING])
            elif beats & (beats - 1) == 0:
                # Repeated, should the verifier have missed the first; ever more rarely, for they pile up while nobody listens.
                self._dealer.send([HELLO, hello])
            await asyncio.sleep(PING_INTERVAL_S)
            if self.state == "ready" and time.monotonic() - self._heard_at > self._silence_limit_s:
                self.close(f"silent for {self._silence_limit_s:g} s")

    async def _watch(self) -> None:
        await self._dealer.disconnected()
        self.close("disconnected")
