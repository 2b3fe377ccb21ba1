"""The client's codec of the engine wire: messages to frames, frames to messages (`backend/wire/engine.py`).  No sockets.

Used by gateways (`gateway/fleet/engine_link.py`) and synchronous clients (`client.py`), which have sockets of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import vllm  # first: its submodules do not import alone
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from backend.fleet import VerifierStats
from backend.records.kept import RowBatch
from backend.transport import Buffer
from backend.wire.engine import (
    ABORT,
    ACCOUNTS,
    ADD,
    ENGINE_WIRE_VERSION,
    GATEWAY_LEASE_S,
    HELLO,
    OUTPUTS,
    PING,
    REFUSED,
    ROWS,
    SHARE,
    STATS,
    TAKEN,
    UTILITY,
    WELCOME,
    Account,
    Addition,
    EngineHello,
    EngineWelcome,
    Refusal,
    RequestOptions,
    Said,
)

_pack = msgspec.msgpack.encode
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    ACCOUNTS: msgspec.msgpack.Decoder(list[Account]),
    STATS: msgspec.msgpack.Decoder(VerifierStats),
    WELCOME: msgspec.msgpack.Decoder(EngineWelcome),
    REFUSED: msgspec.msgpack.Decoder(Refusal),
    ROWS: msgspec.msgpack.Decoder(RowBatch),
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

    def hello(self, name: str, lease_s: float = GATEWAY_LEASE_S, rows: bool = False) -> list[Buffer]:
        """The greeting of a client called `name`; for the rest see `EngineHello`."""
        return [HELLO, _pack(EngineHello(ENGINE_WIRE_VERSION, vllm.__version__, name, lease_s, rows))]

    def add(
        self,
        request: EngineCoreRequest,
        place_id: str,
        emitted: Sequence[int] = (),
        asked: RequestOptions | None = None,
    ) -> list[Buffer]:
        """A request, to be continued after its `emitted` tokens; its outputs will carry the id `place_id`."""
        return [ADD, _pack(Addition(place_id, list(emitted), asked)), *self._encoder.encode(request)]

    def abort(self, place_ids: Sequence[str]) -> list[Buffer]:
        """Aborts these requests: they end without further outputs."""
        return [ABORT, _pack(list(place_ids))]

    @staticmethod
    def share(said: Said) -> list[Buffer]:
        """A text that the verifier may look drafts up in."""
        return [SHARE, _pack(said)]

    def call(self, call_id: int, method: str, args: Sequence[Any]) -> list[Buffer]:
        """Calls a method of the engine core; the result comes with `EngineCoreOutputs`."""
        return [UTILITY, *self._encoder.encode([call_id, method, list(args)])]

    def ask_rows(self, number: int) -> list[Buffer]:
        """Asks for the rows that the verifier keeps; the answer has this number."""
        return [ROWS, _pack(number)]

    def ping(self) -> list[Buffer]:
        return [PING]

    def hear(self, frames: Sequence[Buffer]) -> Any:
        """Decodes vLLM's outputs, `Taken`, a list of `Account`, `VerifierStats`, `EngineWelcome`, `Refusal`, `RowBatch`; None
        for a ping's echo.

        Raises `msgspec.DecodeError`, `IndexError` or `UnicodeError` for an unreadable message.
        """
        kind, rest = bytes(frames[0]), frames[1:]
        if kind == OUTPUTS:
            return self._decoder.decode(rest)
        if kind == TAKEN:
            return Taken(bytes(rest[0]).decode())
        if kind == PING:
            return None
        if kind not in _DECODERS:
            raise msgspec.DecodeError(f"unknown kind of message {kind!r}")
        return _DECODERS[kind].decode(rest[0])
