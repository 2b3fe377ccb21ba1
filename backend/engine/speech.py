"""The engine wire as its client speaks it: messages to frames, frames to messages (`backend/wire/engine.py`).  No socket.

Gateways (`gateway/engine_link.py`) and synchronous clients (`client.py`) use it, each with sockets of its own.
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
    HELLO,
    OUTPUTS,
    PING,
    REFUSED,
    ROWS,
    STATS,
    TAKEN,
    UTILITY,
    WELCOME,
    Account,
    Addition,
    Asked,
    EngineHello,
    EngineWelcome,
    Refusal,
)

_pack = msgspec.msgpack.encode


class Taken(NamedTuple):
    """The verifier's engine has this request now."""

    request_id: str


class UnknownKind(Exception):
    """A frame kind that this version does not know."""


class EngineSpeech:
    """One client's encoder and decoder; not thread-safe."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def hello(self, name: str) -> list[Buffer]:
        """Who we are."""
        return [HELLO, _pack(EngineHello(ENGINE_WIRE_VERSION, vllm.__version__, name))]

    def add(
        self,
        request: EngineCoreRequest,
        place_id: str,
        emitted: Sequence[int] = (),
        noise_seed: int | None = None,
        asked: Asked | None = None,
    ) -> list[Buffer]:
        """A request to be continued after its `emitted` tokens; its outputs come under `place_id`."""
        return [ADD, _pack(Addition(place_id, list(emitted), noise_seed, asked)), *self._encoder.encode(request)]

    def abort(self, place_ids: Sequence[str]) -> list[Buffer]:
        """These end without further outputs."""
        return [ABORT, _pack(list(place_ids))]

    def call(self, call_id: int, method: str, args: Sequence[Any]) -> list[Buffer]:
        """A method of the verifier's engine core; the answer comes among its outputs."""
        return [UTILITY, *self._encoder.encode([call_id, method, list(args)])]

    def ask_rows(self) -> list[Buffer]:
        """What the verifier keeps of its steps."""
        return [ROWS]

    def ping(self) -> list[Buffer]:
        """We live."""
        return [PING]

    def hear(self, frames: Sequence[Buffer]) -> Any:
        """One message: vLLM's outputs, `Taken`, a list of `Account`, `VerifierStats`, `EngineWelcome`, `Refusal`, `RowBatch`;
        None for an echo.

        Raises `msgspec.DecodeError`, `IndexError`, `UnicodeError` for what cannot be read, `UnknownKind`.
        """
        kind, rest = bytes(frames[0]), frames[1:]
        if kind == OUTPUTS:
            return self._decoder.decode(rest)
        if kind == TAKEN:
            return Taken(bytes(rest[0]).decode())
        if kind == ACCOUNTS:
            return msgspec.msgpack.decode(rest[0], type=list[Account])
        if kind == STATS:
            return msgspec.msgpack.decode(rest[0], type=VerifierStats)
        if kind == WELCOME:
            return msgspec.msgpack.decode(rest[0], type=EngineWelcome)
        if kind == REFUSED:
            return msgspec.msgpack.decode(rest[0], type=Refusal)
        if kind == ROWS:
            return msgspec.msgpack.decode(rest[0], type=RowBatch)
        if kind == PING:
            return None
        raise UnknownKind(repr(kind))
