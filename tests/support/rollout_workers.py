"""Verifiers without engines for a rollout, and their directory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from vllm.v1.engine import FinishReason

from backend.config import Settings
from backend.engine.front.client import Outputs
from backend.fleet import FleetSnapshot, MemberView
from backend.fleet.members import MemberState
from backend.records.rows import StepRow, VerificationRow
from backend.rollout.outcome import RoundResult
from backend.rollout.requests import RolloutRequest
from backend.transport.sockets import Wire
from backend.wire.engine import FIXED_RESPONSE
from gateway.fleet import directory as directory_module
from gateway.rollout import run as run_module
from gateway.rollout.fleet import RolloutFleet
from gateway.rollout.run import RoundRunner
from tests.support.fake_verifier import Behaviour, FakeVerifier, Sequence, StaticDirectory


class Workers(StaticDirectory):
    """Verifiers, and the rollout's view of them.  `on_look` runs before every snapshot."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(directory_module, "POLL_INTERVAL_S", 0.02)
        monkeypatch.setattr(run_module, "TEND_S", 0.05)
        self.path = path
        self.verifiers: dict[str, FakeVerifier] = {}
        self.states: dict[str, MemberState] = {}
        """Of those that are not ready."""
        self.on_look: Callable[[], None] = lambda: None
        self._all: list[FakeVerifier] = []

    def start(self, name: str, behaviour: Behaviour) -> FakeVerifier:
        verifier = self.verifiers[name] = FakeVerifier(self.path, name)
        verifier.behaviour = behaviour
        self._all.append(verifier)
        return verifier.start()

    def kill(self, name: str) -> None:
        self.verifiers.pop(name).kill()

    async def snapshot(self) -> FleetSnapshot:
        self.on_look()
        members = [replace(each.member, state=self.states.get(name, "ready")) for name, each in self.verifiers.items()]
        return FleetSnapshot(1, [MemberView(each, 0.0) for each in members], [], {})

    @asynccontextmanager
    async def joined(self, window: int = 3) -> AsyncIterator[RolloutFleet]:
        """A rollout's fleet that knows all verifiers.  At most `window` requests run at each."""
        settings = Settings.model_validate({"verifier": {"max_num_seqs": window}})
        self.fleet = RolloutFleet(self, Wire(), settings, lambda line: None)
        self.fleet.core.start()
        try:
            await self.fleet.until_complete()
            yield self.fleet
        finally:
            self.fleet.core.shutdown()

    def close(self) -> None:
        for verifier in self._all:
            verifier.close()


async def respond(verifier: FakeVerifier, sequence: Sequence, upto: int | None = None) -> None:
    """The fixed response, two tokens a step, and the rows of it."""
    tokens: list[int] = sequence.request.sampling_params.extra_args[FIXED_RESPONSE]
    brought = len(sequence.emitted)
    name = sequence.request_id
    for step, begin in enumerate(range(brought, len(tokens) if upto is None else brought + upto, 2)):
        chunk = tokens[begin : begin + 2]
        sequence.emit(chunk, FinishReason.LENGTH if begin + 2 >= len(tokens) else None)
        verifier.rows.verifications.append(VerificationRow(step, name, 3, 1, len(chunk) - 1, len(chunk), "d", False, True))
        verifier.rows.steps.append(step_row(step, len(chunk)))
        await asyncio.sleep(0)


async def stall(verifier: FakeVerifier, sequence: Sequence) -> None:
    """Two tokens, and nothing more."""
    await respond(verifier, sequence, upto=2)


def step_row(step: int, tokens: int = 1) -> StepRow:
    return StepRow(step, 1.0, 1.0, 1, 0, tokens, 1, tokens, 4, 0, 1.0, 1.0, 2.0, {})


async def run(
    fleet: RolloutFleet, requests: list[RolloutRequest], responses: Outputs | None = None, seed: int | None = None
) -> RoundResult:
    """One round."""
    responses = responses or Outputs(fleet.core, None, log_stats=False)
    return await RoundRunner(0, requests, fleet, responses, lambda line: None, seed).run()
