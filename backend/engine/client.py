"""The client's end of the engine wire (`backend/wire/engine.py`): its codec, and a synchronous client.

`EngineCodec` makes frames of messages and messages of frames, without sockets; gateways (`gateway/fleet/engine_link.py`) use it
too.  Benchmarks and tests use `EngineClient`.  Any process; a client belongs to one thread.  Both use vLLM's request
and output structs and their codec, but no engine.
"""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import vllm  # first: its submodules do not import alone
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from backend.fleet import VerifierStats
from backend.transport import Buffer, Hub, Wire
from backend.wire import engine as wire

PING_EVERY_S = 1.0
POLL_S = 0.2
_pack = msgspec.msgpack.encode
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    wire.ACCOUNTS: msgspec.msgpack.Decoder(list[wire.Account]),
    wire.STATS: msgspec.msgpack.Decoder(VerifierStats),
    wire.WELCOME: msgspec.msgpack.Decoder(wire.EngineWelcome),
    wire.REFUSED: msgspec.msgpack.Decoder(wire.Refusal),
}
"""By kind: messages of one frame."""


class Taken(NamedTuple):
    """The verifier's engine has this request."""

    request_id: str


class EngineCodec:
    """One client's encoder and decoder; not thread-safe."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def hello(self, name: str, lease_s: float = wire.GATEWAY_LEASE_S) -> list[Buffer]:
        """The greeting of a client called `name`; for the rest see `EngineHello`."""
        return [wire.HELLO, _pack(wire.EngineHello(wire.ENGINE_WIRE_VERSION, vllm.__version__, name, lease_s))]

    def add(
        self, request: EngineCoreRequest, place_id: str, emitted: Sequence[int] = (), options: wire.RequestOptions | None = None
    ) -> list[Buffer]:
        """A request, to be continued after its `emitted` tokens; its outputs will carry the id `place_id`."""
        return [wire.ADD, _pack(wire.Addition(place_id, list(emitted), options)), *self._encoder.encode(request)]

    def abort(self, place_ids: Sequence[str]) -> list[Buffer]:
        """Aborts these requests: they end without further outputs."""
        return [wire.ABORT, _pack(list(place_ids))]

    @staticmethod
    def share(shared: wire.EmittedText) -> list[Buffer]:
        """A text that the verifier may look drafts up in."""
        return [wire.SHARE, _pack(shared)]

    def call(self, call_id: int, method: str, args: Sequence[Any]) -> list[Buffer]:
        """Calls a method of the engine core; the result comes with `EngineCoreOutputs`."""
        return [wire.UTILITY, *self._encoder.encode([call_id, method, list(args)])]

    def ping(self) -> list[Buffer]:
        return [wire.PING]

    def hear(self, frames: Sequence[Buffer]) -> Any:
        """Decodes vLLM's outputs, `Taken`, a list of `Account`, `VerifierStats`, `EngineWelcome`, `Refusal`; None for a
        ping's echo.

        Raises `msgspec.DecodeError`, `IndexError` or `UnicodeError` for an unreadable message.
        """
        kind, rest = bytes(frames[0]), frames[1:]
        if kind == wire.OUTPUTS:
            return self._decoder.decode(rest)
        if kind == wire.TAKEN:
            return Taken(bytes(rest[0]).decode())
        if kind == wire.PING:
            return None
        if kind not in _DECODERS:
            raise msgspec.DecodeError(f"unknown kind of message {kind!r}")
        return _DECODERS[kind].decode(rest[0])


class EngineRefused(Exception):
    """The verifier refused this client's greeting; the message is the verifier's reason."""


@dataclass
class Answer:
    """What came back for one request.  Times are `time.monotonic()` seconds at this client."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    sent_at: float = 0.0
    first_at: float = 0.0
    """When the first token came; 0 until then."""
    last_at: float = 0.0
    account: wire.Account | None = None
    """None unless `RequestOptions.account` asked for it."""


def engine_request(request_id: str, prompt: list[int], params: SamplingParams, **fields: Any) -> EngineCoreRequest:
    """vLLM's request for token ids; `fields` are further fields of `EngineCoreRequest`."""
    unused = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
    values = {"prompt_token_ids": prompt, "sampling_params": params, "arrival_time": time.time(), **unused, **fields}
    return EngineCoreRequest(request_id=request_id, **values)


def sampling(max_tokens: int, temperature: float) -> SamplingParams:
    """Parameters for exactly `max_tokens` tokens; greedy at temperature 0."""
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)


def fixed_sampling(tokens: list[int], temperature: float) -> SamplingParams:
    """Parameters for a fixed response of these tokens; see `fixed.py`."""
    params = sampling(len(tokens), temperature)
    params.extra_args = {wire.FIXED_RESPONSE: tokens}
    params.output_kind, params.detokenize = RequestOutputKind.FINAL_ONLY, False
    return params


class EngineClient:
    """A connection to one verifier; the constructor waits for the answer to its greeting.

    `watch` is called during waits and may raise to end them (if the verifier's process has ended).
    Raises `EngineRefused`, `TimeoutError`.
    """

    def __init__(self, address: str, name: str = "client", watch: Callable[[], None] | None = None) -> None:
        self.hub = Hub(Wire())
        self.dealer = self.hub.dealer(address)
        self._codec = EngineCodec()
        self.answers: dict[str, Answer] = {}
        self.stats: VerifierStats | None = None
        self.welcome: wire.EngineWelcome | None = None
        self.refusals: list[str] = []
        self._watch = watch
        self.dealer.send(*self._codec.hello(name, math.inf))
        try:
            self.run_until(lambda: self.welcome is not None or bool(self.refusals))
        except BaseException:
            self.close()
            raise
        if self.welcome is None:
            self.close()
            raise EngineRefused(self.refusals[0])

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        emitted: Sequence[int] = (),
        options: wire.RequestOptions | None = None,
        **fields: Any,
    ) -> str:
        """Sends an `engine_request`, to be continued after the `emitted` output tokens; returns its id."""
        request_id = request_id or f"req-{uuid.uuid4().hex[:8]}"
        request = engine_request(request_id, prompt, params, **fields)
        self.answers[request_id] = Answer(sent_at=time.monotonic())
        self.dealer.send(*self._codec.add(request, request_id, emitted, options=options))
        return request_id

    def abort(self, request_id: str) -> None:
        self.dealer.send(*self._codec.abort([request_id]))

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Receives until `condition()` is true.

        Raises `TimeoutError` after `timeout_s`, and what `watch` raises.
        """
        deadline = time.monotonic() + timeout_s
        pinged = 0.0
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("the condition was not met in time")
            if now - pinged > PING_EVERY_S:
                self.dealer.send(*self._codec.ping())
                pinged = now
                if self._watch is not None:
                    self._watch()
            self.hub.poll(POLL_S)
            self.receive()

    def receive(self) -> None:
        """Takes everything that has arrived, without waiting."""
        while (frames := self.dealer.receive()) is not None:
            self._take(frames)

    def finish_all(self, timeout_s: float = 300.0) -> None:
        """Waits until every request has ended."""
        self.run_until(lambda: all(a.finish_reason is not None for a in self.answers.values()), timeout_s)

    def fresh_stats(self) -> VerifierStats:
        """Waits for counters that were published after this call."""
        for _ in range(2):
            # The first ones may have been sent before this call.
            self.stats = None
            self.run_until(lambda: self.stats is not None)
        assert self.stats is not None
        return self.stats

    def close(self) -> None:
        self.hub.close()

    def _take(self, frames: list[bytes]) -> None:
        now = time.monotonic()
        heard = self._codec.hear(frames)
        if isinstance(heard, EngineCoreOutputs):
            for output in heard.outputs:
                self._take_output(output, now)
        elif isinstance(heard, list):
            for account in heard:
                if account.request_id in self.answers:
                    self.answers[account.request_id].account = account
        elif isinstance(heard, VerifierStats):
            self.stats = heard
        elif isinstance(heard, wire.EngineWelcome):
            self.welcome = heard
        elif isinstance(heard, wire.Refusal):
            self.refusals.append(heard.message)

    def _take_output(self, output: EngineCoreOutput, now: float) -> None:
        answer = self.answers.get(output.request_id)
        if answer is None:
            return
        if output.new_token_ids:
            answer.tokens.extend(output.new_token_ids)
            answer.first_at = answer.first_at or now
            answer.last_at = now
        answer.outputs.append(output)
        if output.finish_reason is not None:
            answer.finish_reason = str(output.finish_reason)
