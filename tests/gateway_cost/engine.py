"""An engine that emits ready-made tokens: one per sequence and step, all sequences of a client in one message.  Own process."""

import mmap
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import vllm  # noqa: F401  (first: its submodules do not import alone)
import zmq
from tokenizers import Tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from backend.wire import engine as wire

EMISSIONS = 256
"""Steps whose times are kept; so many different tokens there are."""


def words(model_dir: str) -> dict[str, int]:
    """`EMISSIONS` tokens of letters only: text, id."""
    vocabulary = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json")).get_vocab()
    fit = sorted((text, token) for text, token in vocabulary.items() if text.isascii() and text.isalpha())
    return dict(fit[:EMISSIONS])


class Emissions:
    """When each of the last steps was taken, in shared memory: monotonic seconds by the step's number."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._times = memoryview(mmap.mmap(file.fileno(), 8 * EMISSIONS)).cast("d")

    @staticmethod
    def create(path: Path) -> Path:
        path.write_bytes(bytes(8 * EMISSIONS))
        return path

    def __setitem__(self, step: int, at: float) -> None:
        self._times[step % EMISSIONS] = at

    def __getitem__(self, step: int) -> float:
        return self._times[step % EMISSIONS]


class Engine:
    """Speaks the engine wire.  A request for one token is answered at once, others in the steps."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._tokens = list(words(job["model"]).values())
        self._emissions = Emissions(job["emissions"])
        self._interval = job["interval_s"]
        self._limit = job["context"]
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER silently drops what does not fit
        self._socket.bind(job["address"])
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self._running: dict[bytes, dict[str, int]] = {}
        self._step = 0

    def run(self, pipe: Connection) -> None:
        """Serves until the pipe is closed."""
        due = time.monotonic()
        while not pipe.poll():
            wait = min(due - time.monotonic(), 1.0)
            if wait <= 0:
                self._emit()
                due = max(due + self._interval, time.monotonic() - self._interval)
                continue
            if self._socket.poll(max(1, round(wait * 1000))):
                while self._socket.poll(0):
                    self._hear(*self._socket.recv_multipart())

    def _emit(self) -> None:
        self._step += 1
        token = self._tokens[self._step % EMISSIONS]
        self._emissions[self._step] = time.monotonic()
        for client, sequences in self._running.items():
            if not sequences:
                continue
            outputs = []
            for name, left in sequences.items():
                end = FinishReason.LENGTH if left == 1 else None
                outputs.append(EngineCoreOutput(request_id=name, new_token_ids=[token], finish_reason=end))
            self._send(client, outputs)
            self._running[client] = {name: left - 1 for name, left in sequences.items() if left > 1}

    def _send(self, client: bytes, outputs: list[EngineCoreOutput]) -> None:
        frames = self._encoder.encode(EngineCoreOutputs(outputs=outputs))
        self._socket.send_multipart([client, wire.OUTPUTS, *frames])

    def _hear(self, client: bytes, kind: bytes, *frames: bytes) -> None:
        if kind == wire.HELLO:
            self._running[client] = {}
            welcome = wire.EngineWelcome(wire.ENGINE_WIRE_VERSION, "verifier-0", "one", self._limit, 10_000, 16, ["generate"])
            self._socket.send_multipart([client, wire.WELCOME, msgspec.msgpack.encode(welcome)])
        elif kind == wire.PING:
            self._socket.send_multipart([client, wire.PING])
        elif kind == wire.ADD:
            name = msgspec.msgpack.decode(frames[0], type=wire.Addition).request_id
            params = self._requests.decode(frames[1:]).sampling_params
            self._socket.send_multipart([client, wire.TAKEN, name.encode()])
            if params.max_tokens == 1:
                self._send(client, [EngineCoreOutput(name, [self._tokens[0]], finish_reason=FinishReason.LENGTH)])
            else:
                self._running[client][name] = params.max_tokens
        elif kind == wire.ABORT:
            for name in msgspec.msgpack.decode(frames[0]):
                self._running[client].pop(name, None)


def main(job: dict[str, Any], pipe: Connection) -> None:
    """A test child's main: says its address when it listens."""
    engine = Engine(job)
    pipe.send(job["address"])
    engine.run(pipe)
