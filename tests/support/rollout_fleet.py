"""Verifiers without engines for a rollout, and the coordinator's view of them."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tqdm import tqdm
from vllm.v1.engine import FinishReason

from backend.engine.front.offline import ResponseMaker
from backend.fleet import FleetSnapshot, MemberView
from backend.fleet.members import MemberState
from backend.records.rows import RequestRow, StepRow, VerificationRow
from backend.rollout import run as run_module
from backend.rollout import workers as workers_module
from backend.rollout.outcome import RoundResult
from backend.rollout.requests import RolloutRequest
from backend.rollout.run import RoundRunner
from backend.rollout.workers import Worker, Workers
from backend.wire.engine import FIXED_RESPONSE
from tests.support.fake_verifier import FakeVerifier, Sequence


class Fleet:
    """Verifiers in a thread of their own, and the coordinator's view of them.  `on_look` runs before every snapshot."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.verifiers: dict[str, FakeVerifier] = {}
        self.states: dict[str, MemberState] = {}
        """Of those that are not ready."""
        self.coordinator = ""
        self.workers: Workers | None = None
        self._all: list[FakeVerifier] = []
        self.on_look: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, name: str, behaviour: Any) -> FakeVerifier:
        async def begin() -> FakeVerifier:
            verifier = FakeVerifier(self.directory, name)
            verifier.behaviour = behaviour
            return verifier.start()

        self.verifiers[name] = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)
        self._all.append(self.verifiers[name])
        return self.verifiers[name]

    def kill(self, name: str) -> None:
        self.call(self.verifiers.pop(name).kill)

    def call(self, what: Callable[[], None]) -> None:
        """Does it where the verifiers live, before it returns."""

        async def done() -> None:
            what()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(10)

    def known(self, name: str) -> Worker | None:
        """The round's worker of this name."""
        return self.workers.present.get(name) if self.workers is not None else None

    def snapshot(self) -> FleetSnapshot:
        self.on_look()
        members = [replace(each.member, state=self.states.get(name, "ready")) for name, each in self.verifiers.items()]
        return FleetSnapshot(1, [MemberView(each, 0.0) for each in members], [], {}, coordinator=self.coordinator)

    def close(self) -> None:
        async def end() -> None:
            for verifier in self._all:
                verifier.kill()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def rollout_fleet(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet at which rollouts look often."""
    monkeypatch.setattr(run_module, "LOOK_S", 0.05)
    monkeypatch.setattr(run_module, "TEND_S", 0.05)
    monkeypatch.setattr(workers_module, "SETTLED_S", 0.05)
    fleet = Fleet(directory)
    try:
        yield fleet
    finally:
        fleet.close()


async def respond(verifier: FakeVerifier, sequence: Sequence, upto: int | None = None, with_row: bool = True) -> None:
    """The fixed response, two tokens a step, and the rows of it."""
    tokens: list[int] = sequence.request.sampling_params.extra_args[FIXED_RESPONSE]
    brought = len(sequence.emitted)
    name = sequence.request.request_id
    verifications = 0
    for step, begin in enumerate(range(brought, len(tokens) if upto is None else brought + upto, 2)):
        chunk = tokens[begin : begin + 2]
        sequence.emit(chunk, FinishReason.LENGTH if begin + 2 >= len(tokens) else None)
        verifications += 1
        verifier.rows.verifications.append(VerificationRow(step, name, 3, 1, len(chunk) - 1, len(chunk), "d", False, True))
        verifier.rows.steps.append(StepRow(step, 1.0, 1.0, 1, 0, len(chunk), 1, len(chunk), 4, 0, 1.0, 1.0, 2.0, {}))
        await asyncio.sleep(0)
    if upto is None and with_row:
        here = len(tokens) - brought
        row = RequestRow(name, 0.0, 0.0, 1.0, 3, here, verifications, verifications, 0, "length", True, brought)
        verifier.rows.requests.append(row)


async def stall(verifier: FakeVerifier, sequence: Sequence) -> None:
    """Two tokens, and nothing more."""
    await respond(verifier, sequence, upto=2)


def run(
    fleet: Fleet, asked: list[RolloutRequest], responses: ResponseMaker, window: int = 3, seed: int | None = None
) -> RoundResult:
    """One round."""
    workers = fleet.workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        workers.look()
        bar = tqdm(file=io.StringIO(), total=len(asked))
        return RoundRunner(0, asked, workers, window, responses, bar, seed).run()
    finally:
        workers.close()
