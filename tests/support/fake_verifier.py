"""A verifier without an engine: an asyncio ROUTER that speaks `backend.wire.engine` and emits what a test decides.

And a fleet's directory without a coordinator.  Tests only.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import vllm  # noqa: F401  (first: its submodules do not import alone)
import zmq
import zmq.asyncio
from tokenizers import Tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from backend.coordinator.commands import Answer, AnyCommand, CommandRefused
from backend.fleet import FleetSnapshot, Member, MemberView, VerifierStats
from backend.fleet.stats import Weights
from backend.models.demo import TARGET_DIR
from backend.records.kept import RowBatch
from backend.wire import engine as wire
from gateway.fleet.directory import Directory

Behaviour = Callable[["FakeVerifier", "Sequence"], Awaitable[None]]


class Sequence:
    """One request at a fake verifier."""

    def __init__(self, verifier: FakeVerifier, client: bytes, request: EngineCoreRequest, addition: wire.Addition) -> None:
        self.request = request
        self.request_id = addition.request_id
        self.addition = addition
        self.emitted = addition.emitted
        self.client = client
        self.aborted = asyncio.Event()
        self._verifier = verifier

    @property
    def max_tokens(self) -> int:
        return self.request.sampling_params.max_tokens

    def emit(
        self,
        tokens: list[int],
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: LogprobsLists | None = None,
    ) -> None:
        output = EngineCoreOutput(self.request_id, tokens, finish_reason=finish, stop_reason=stop_reason, new_logprobs=logprobs)
        self._verifier.send(self.client, wire.OUTPUTS, *MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output])))


async def count_up(verifier: FakeVerifier, sequence: Sequence) -> None:
    """The default behaviour: emits the tokens 300, 301, ... up to `max_tokens`, two at a time, after those emitted before."""
    for start in range(len(sequence.emitted), sequence.max_tokens, 2):
        tokens = [300 + index for index in range(start, min(start + 2, sequence.max_tokens))]
        last = start + 2 >= sequence.max_tokens
        # This code shares the gateway's event loop, which hundreds of sequences at once would block for too long.
        async with verifier.turn:
            sequence.emit(tokens, FinishReason.LENGTH if last else None)
            await asyncio.sleep(0)


def gated(gate: asyncio.Event) -> Behaviour:
    """Emits a token at once, and the last one when `gate` is set."""

    async def behaviour(verifier: FakeVerifier, sequence: Sequence) -> None:
        sequence.emit([300])
        await gate.wait()
        sequence.emit([301], FinishReason.LENGTH)

    return behaviour


def stalling(count: int) -> Behaviour:
    """Emits so many tokens after those emitted before, then nothing until the sequence is aborted."""

    async def behaviour(verifier: FakeVerifier, sequence: Sequence) -> None:
        first = 300 + len(sequence.emitted)
        if count:
            sequence.emit(list(range(first, first + count)))
        await sequence.aborted.wait()

    return behaviour


stall, silence = stalling(2), stalling(0)


@cache
def tokenizer() -> Any:
    return Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))


def saying(text: str, finish: FinishReason = FinishReason.STOP) -> Behaviour:
    """Emits a text in the demo target's tokens, two at a time."""

    async def behaviour(verifier: FakeVerifier, sequence: Sequence) -> None:
        tokens = tokenizer().encode(text, add_special_tokens=False).ids
        if finish is FinishReason.STOP:
            # The stop token is emitted too, but is not part of the text.
            tokens.append(tokenizer().token_to_id("<|endoftext|>"))
        for start in range(0, len(tokens), 2):
            sequence.emit(tokens[start : start + 2], finish if start + 2 >= len(tokens) else None)
            await asyncio.sleep(0)

    return behaviour


class FakeVerifier:
    """Must be started in a running loop.  `behaviour` decides what each request emits; `sequences` keeps all requests."""

    def __init__(self, directory: Path, name: str = "verifier-0", max_model_len: int = 256) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.turn = asyncio.Semaphore(8)
        self.weights = Weights()
        self.clients: set[bytes] = set()
        self.rows = RowBatch()
        self.incarnation = uuid.uuid4().hex
        self.address = f"ipc://{directory}/{name}-{self.incarnation[:8]}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A ROUTER silently drops what does not fit into a queue, which may fill up while ZeroMQ's own thread gets no processor.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self.renew()

    def renew(self) -> None:
        """Behaves as a new one, and forgets what it was asked."""
        self.behaviour: Behaviour = count_up
        self.sequences: list[Sequence] = []
        self.added = asyncio.Event()
        self.takes = True
        """Whether it confirms each request with `TAKEN`, as if its engine had it."""
        self.hung = False
        """Whether it stays connected but answers nothing."""
        self.utilities: list[tuple[str, list[Any]]] = []
        self.failure: str | None = None
        """If set, every utility call fails with this message."""
        self.holds = False
        """Whether utility calls wait for `carry_out`."""
        self._held: list[Callable[[], None]] = []

    def start(self) -> FakeVerifier:
        self._socket.bind(self.address)
        self._spawn(self._serve())
        return self

    @property
    def member(self) -> Member:
        return Member(self.name, "verifier", self.incarnation, self.address, "", "node-a", os.getpid(), "fake", state="ready")

    def kill(self) -> None:
        """Ends at once, as a killed process does."""
        for task in list(self._tasks):
            task.cancel()
        self._socket.close(linger=0)

    def close(self) -> None:
        self.kill()
        self._context.term()

    def send(self, client: bytes, *frames: Any) -> None:
        self._socket.send_multipart([client, *frames])

    def refuse(self, reason: Any) -> None:
        for client in self.clients:
            self.send(client, wire.REFUSED, msgspec.msgpack.encode(wire.Refusal(reason, "test")))

    def send_stats(self, paused: bool = False) -> None:
        stats = VerifierStats(self.name, 1000.0, "sync", 4, weights=self.weights)
        stats.paused = paused
        self.publish(stats)

    def publish(self, stats: VerifierStats) -> None:
        for client in self.clients:
            self.send(client, wire.STATS, msgspec.msgpack.encode(stats))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self) -> None:
        decoder = MsgpackDecoder(EngineCoreRequest)
        while True:
            client, kind, *frames = await self._socket.recv_multipart()
            if self.hung:
                continue
            if kind == wire.HELLO:
                self.clients.add(client)
                welcome = wire.EngineWelcome(
                    wire.ENGINE_WIRE_VERSION,
                    self.name,
                    self.incarnation,
                    self.max_model_len,
                    100,
                    16,
                    ["generate"],
                    self.weights,
                )
                self.send(client, wire.WELCOME, msgspec.msgpack.encode(welcome))
            elif client not in self.clients:
                self.send(client, wire.REFUSED, msgspec.msgpack.encode(wire.Refusal("unknown", "say hello first")))
            elif kind == wire.PING:
                self.send(client, wire.PING)
            elif kind == wire.ADD:
                addition = msgspec.msgpack.decode(frames[0], type=wire.Addition)
                sequence = Sequence(self, client, decoder.decode(frames[1:]), addition)
                self.sequences.append(sequence)
                if self.takes:
                    self.send(client, wire.TAKEN, addition.request_id.encode())
                self.added.set()
                self._spawn(self.behaviour(self, sequence))
                await asyncio.sleep(0)
            elif kind == wire.ABORT:
                for request_id in msgspec.msgpack.decode(frames[0]):
                    for sequence in self.sequences:
                        if sequence.request_id == request_id:
                            sequence.aborted.set()
            elif kind == wire.UTILITY:
                call_id, method, arguments = msgspec.msgpack.decode(frames[0])
                self.utilities.append((method, arguments))
                self._held.append(partial(self._carry_out, client, call_id, method, arguments))
                if not self.holds:
                    self.carry_out()

    def carry_out(self) -> None:
        """Carries out the calls that have come."""
        held, self._held = self._held, []
        for call in held:
            call()

    def _carry_out(self, client: bytes, call_id: int, method: str, arguments: list[Any]) -> None:
        if method in ("reload_weights", "catch_up") and not self.failure and not isinstance(arguments[-1], str):
            self.weights = Weights(arguments[-1], arguments[1], arguments[0])
            self.send_stats()
        result: bool | bytes = True
        if method == "take_rows":
            result, self.rows = msgspec.msgpack.encode(self.rows), RowBatch()
        output = UtilityOutput(call_id, self.failure, None if self.failure else UtilityResult(result))
        answer = EngineCoreOutputs(utility_output=output)
        self.send(client, wire.OUTPUTS, *MsgpackEncoder().encode(answer))


class StaticDirectory(Directory):
    """A directory without a coordinator."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._version = 0
        self.members: list[Member] = []
        self.set_members(members)

    def set_members(self, members: Iterable[Member]) -> None:
        self._version += 1
        self.members = list(members)

    async def snapshot(self) -> FleetSnapshot:
        views = [MemberView(member, 0.0) for member in self.members]
        return FleetSnapshot(self._version, views, [], {})

    async def look(self) -> FleetSnapshot:
        return await self.snapshot()

    async def submit(self, command: AnyCommand) -> Answer:
        return CommandRefused("invalid", "this fleet has no coordinator", self._version)


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition is true; raises `AssertionError` if it is not within two minutes."""
    deadline = time.monotonic() + 120.0
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.01)
