"""The verifier's side of the engine wire.  Engine process, engine thread.

Knows which gateway sent which request, decodes messages with vLLM's own codec, and aborts the requests of a silent gateway.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import vllm
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from backend.engine.resume import add_request
from backend.engine.weights import WeightControl
from backend.engine.worker.fixed import refuse_unfit
from backend.fleet import VerifierStats
from backend.records.kept import KEPT_ROWS, KeptRows
from backend.records.rows import Row
from backend.transport import Buffer, ServerSocket
from backend.wire import engine as wire

logger = logging.getLogger(__name__)

LORA = frozenset({"add_lora", "remove_lora"})
"""Methods that write into memory that the weights give up while they sleep."""
UTILITIES = LORA | {"is_scheduler_paused", "is_sleeping", "reset_prefix_cache"}
"""Methods of vLLM's engine core that a gateway may call."""
SWAPPING = {
    "catch_up",
    "finish_weight_update",
    "init_weight_transfer_engine",
    "pause",
    "reload_weights",
    "resume",
    "sleep",
    "start_weight_update",
    "update_weights",
    "wake_up",
}
"""Methods of `WeightControl` that a gateway may call; their time is idle time of cause `swap`."""


@dataclass
class _Gateway:
    identity: bytes
    index: int
    last_heard: float
    lease_s: float


class GatewayPort:
    """Takes in gateways' requests and sends outputs.

    `files` takes rows in any case, `KeptRows` while a client takes them from there.
    """

    def __init__(
        self,
        router: ServerSocket,
        core: EngineCore,
        welcome: wire.EngineWelcome,
        files: Callable[[Row], None] | None,
        weights: WeightControl,
    ) -> None:
        self._weights = weights
        self._swapping_s = 0.0
        self._router = router
        self._core = core
        self._welcome = welcome
        self._files = files
        self._kept: KeptRows | None = None
        self._taker: _Gateway | None = None
        """The client that has taken rows last."""
        core.scheduler.record_to(files)
        self._by_identity: dict[bytes, _Gateway] = {}
        self._by_index: dict[int, _Gateway] = {}
        self._next_index = 1
        self._vocab_size: int = core.vllm_config.model_config.get_vocab_size()
        self._encoder = MsgpackEncoder()
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._plain = MsgpackDecoder()

    def receive(self, now: float) -> float:
        """Takes every message that has arrived.  Returns the seconds spent on sleeping, waking and loading weights."""
        self._swapping_s, began = 0.0, time.monotonic()
        while (message := self._router.receive()) is not None:
            identity, frames = message
            kind, payload = (frames[0], frames[1:]) if frames else (b"", [])
            # The message before may have had weights or an adapter loaded, for minutes: no gateway was silent meanwhile.
            read_at = now + time.monotonic() - began
            if kind == wire.HELLO:
                self._hello(identity, payload, read_at)
                continue
            gateway = self._by_identity.get(identity)
            if gateway is None:
                self._refuse(identity, "unknown", "say hello first")
                continue
            gateway.last_heard = read_at
            try:
                self._dispatch(gateway, kind, payload)
            except (msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
                logger.warning("gateway message refused: %s", error)
                self._refuse(identity, "unreadable", "a message could not be read")
        return self._swapping_s

    def send_outputs(self, outputs: dict[int, EngineCoreOutputs] | None) -> None:
        """Sends one step's outputs to the gateways they belong to."""
        self._send_accounts()
        for index, its_outputs in (outputs or {}).items():
            gateway = self._by_index.get(index)
            if gateway is None or not (its_outputs.outputs or its_outputs.utility_output):
                continue
            self._tell(gateway, wire.OUTPUTS, *self._encoder.encode(its_outputs))

    def _tell(self, gateway: _Gateway, kind: bytes, *payload: Buffer) -> None:
        """Sends a message that must not be missing between others; a gateway whose queue is full has to greet again."""
        if not self._router.send(gateway.identity, kind, *payload):
            logger.error("gateway %d does not read its messages; dropping it", gateway.index)
            self._forget(gateway)

    def _send_accounts(self) -> None:
        for index, accounts in self._core.scheduler.accounts.take().items():
            gateway = self._by_index.get(index)
            if gateway is not None:
                self._tell(gateway, wire.ACCOUNTS, msgspec.msgpack.encode(accounts))

    def send_stats(self, stats: VerifierStats) -> None:
        """Sends the counters to every gateway whose queue has room."""
        stats.connections_refused = self._router.connections_refused()
        payload = msgspec.msgpack.encode(stats)
        for gateway in self._by_identity.values():
            self._router.send(gateway.identity, wire.STATS, payload)

    def expire(self, now: float) -> None:
        """Aborts the requests of gateways whose lease has run out."""
        for gateway in [g for g in self._by_identity.values() if now - g.last_heard > g.lease_s]:
            logger.warning("gateway %d is silent; its requests are aborted", gateway.index)
            self._forget(gateway)

    def _hello(self, identity: bytes, payload: list[bytes], now: float) -> None:
        try:
            hello = msgspec.msgpack.decode(payload[0], type=wire.EngineHello)
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            self._refuse(identity, "incompatible", "the greeting could not be read")
            return
        ours = vllm.__version__
        if (hello.version, hello.vllm_version) != (wire.ENGINE_WIRE_VERSION, ours):
            self._refuse(identity, "incompatible", f"this verifier speaks wire {wire.ENGINE_WIRE_VERSION} of vLLM {ours}")
            return
        if identity not in self._by_identity:
            gateway = _Gateway(identity, self._next_index, now, hello.lease_s)
            self._next_index += 1
            self._by_identity[identity] = self._by_index[gateway.index] = gateway
        self._by_identity[identity].last_heard = now
        welcome = msgspec.structs.replace(self._welcome, weights=self._weights.loaded)
        self._router.send(identity, wire.WELCOME, msgspec.msgpack.encode(welcome))

    def _refuse(self, identity: bytes, reason: Literal["unknown", "incompatible", "unreadable"], message: str) -> None:
        self._router.send(identity, wire.REFUSED, msgspec.msgpack.encode(wire.Refusal(reason, message)))

    def _dispatch(self, gateway: _Gateway, kind: bytes, payload: list[bytes]) -> None:
        if kind == wire.ADD:
            self._add(gateway, msgspec.msgpack.decode(payload[0], type=wire.Addition), payload[1:])
        elif kind == wire.ABORT:
            self._core.abort_requests(msgspec.msgpack.decode(payload[0], type=list[str]))
            self._send_accounts()
        elif kind == wire.UTILITY:
            call_id, method, arguments = self._plain.decode(payload)
            self._utility(gateway, call_id, method, arguments)
        elif kind == wire.SHARE and self._welcome.looks_up:
            self._core.scheduler.speculator.candidates.share(msgspec.msgpack.decode(payload[0], type=wire.EmittedText))
        elif kind == wire.PING:
            self._router.send(gateway.identity, wire.PING)
        else:
            raise ValueError("unknown kind of message")

    def _add(self, gateway: _Gateway, addition: wire.Addition, frames: list[bytes]) -> None:
        try:
            request = self._requests.decode(frames)
            request.request_id, request.client_index = addition.request_id, gateway.index
            refuse_unfit(request, self._welcome.fixed_responses, self._vocab_size, self._welcome.max_model_len)
            if request.lora_request is not None:
                self._weights.read_adapter(request.lora_request)
            add_request(self._core, request, addition.emitted, addition.options)
            self._tell(gateway, wire.TAKEN, addition.request_id.encode())
        except Exception as error:
            # An error in one request, unreadable frames included, must not end the engine for the others.
            logger.warning("request refused: %s: %s", type(error).__name__, error)
            output = EngineCoreOutput(addition.request_id, [], finish_reason=FinishReason.ERROR)
            self.send_outputs({gateway.index: EngineCoreOutputs(outputs=[output])})

    def _utility(self, gateway: _Gateway, call_id: int, method: str, arguments: list[Any]) -> None:
        began = time.monotonic()
        self._answer(gateway, call_id, lambda: self._call(gateway, method, arguments))
        if method in SWAPPING:
            self._swapping_s += time.monotonic() - began

    def _call(self, gateway: _Gateway, method: str, arguments: list[Any]) -> Any:
        if method == "take_rows":
            return self._take_rows(gateway)
        if method not in SWAPPING | UTILITIES:
            raise LookupError(f"{method} cannot be called on a verifier")
        if method in LORA:
            self._weights.refuse_unless_whole()
        # vLLM's own method says which types the arguments have.
        typed = getattr(self._weights if method in SWAPPING else self._core, method)
        function = getattr(self._weights, method) if method in LORA else typed
        return function(*EngineCoreProc._convert_msgspec_args(typed, arguments))

    def _take_rows(self, gateway: _Gateway) -> bytes:
        """The rows since the last call, as a packed `RowBatch`.  They are kept from the first call until its client is gone."""
        self._taker = gateway
        if self._kept is None:
            self._kept = KeptRows(KEPT_ROWS, self._files)
            self._core.scheduler.record_to(self._kept.put)
        return msgspec.msgpack.encode(self._kept.take())

    def _answer(self, gateway: _Gateway, call_id: int, get: Callable[[], Any]) -> None:
        """Sends what `get` returns or raises; if that is a future, when it is done."""
        output = UtilityOutput(call_id)
        try:
            result = get()
            if isinstance(result, Future):
                result.add_done_callback(lambda done: self._answer(gateway, call_id, done.result))
                return
            output.result = UtilityResult(result)
        except Exception as error:
            # The caller gets the error; the engine goes on.
            output.failure_message = f"{type(error).__name__}: {error}"
        self.send_outputs({gateway.index: EngineCoreOutputs(utility_output=output)})

    def _forget(self, gateway: _Gateway) -> None:
        del self._by_identity[gateway.identity], self._by_index[gateway.index]
        if gateway is self._taker:
            self._taker = self._kept = None
            self._core.scheduler.record_to(self._files)
        mine = [r for r, request in self._core.scheduler.requests.items() if request.client_index == gateway.index]
        if mine:
            self._core.abort_requests(mine)
