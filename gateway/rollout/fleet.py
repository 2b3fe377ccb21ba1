"""A rollout's fleet: the gateway's core, the rows of verifiers, and who is lost or drained.  The command's event loop.

A verifier that is started again, reached again, or takes requests again is the same worker of the round, by its number.
"""

import asyncio
import json
import math
import time
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from backend.config import Settings
from backend.config.sources import ConfigError, Say
from backend.records.kept import RowBatch
from backend.rollout.options import NEEDED_BY_FIXED
from backend.rollout.outcome import Death, WorkerShare
from backend.transport.sockets import Wire
from backend.wire.engine import GATEWAY_LEASE_S
from gateway.fleet.core import FleetCore
from gateway.fleet.directory import Directory
from gateway.fleet.engine_link import Cause, VerifierLink
from gateway.metrics.gateway import GatewayMetrics

START_S = 120.0
"""Seconds that the verifiers may take to answer before the first round."""
LOOK_S = 0.05
PATIENCE = 6.0
"""A silent verifier may merely be starved of CPU time: it is kept for 9 s without a lease, for 60 s with one."""


class RolloutFleet:
    """Verifiers over rounds.  `core` gets the requests."""

    def __init__(self, directory: Directory, wire: Wire, settings: Settings, say: Say) -> None:
        self.core = FleetCore(directory, wire, GatewayMetrics(), settings, PATIENCE)
        # The round decides how long its requests wait for a verifier.
        self.core.gate.limit(1, math.inf)
        self.core.on_welcome, self.core.on_look, self.core.on_gone = self._on_welcome, self._on_look, self._on_gone
        self.window = settings.verifier.max_num_seqs
        """Most requests that run at one verifier."""
        self._say = say
        self._drained: set[str] = set()
        """Incarnations."""
        self._next_step: dict[str, int] = {}
        self._first_step: dict[str, int] = {}
        """What is added to an incarnation's step numbers, so that they go on after those of the incarnation before."""
        self.begin(0)

    def begin(self, number: int) -> None:
        """Rows and losses are of round `number` from now on."""
        self.number, self.began = number, time.monotonic()
        self.deaths: list[Death] = []
        self.parts: dict[int, WorkerShare] = {}
        for link in self.core.ready_links:
            self.part(link.member.id)

    def part(self, verifier_id: str) -> WorkerShare:
        """A verifier's share of the round."""
        return self.parts.setdefault(number := _number(verifier_id), WorkerShare(number))

    @property
    def version(self) -> str:
        """Version of the weights that the verifiers run; several versions if they differ."""
        return ", ".join(sorted({link.weights.version for link in self.core.ready_links}))

    async def until_complete(self) -> None:
        """Waits until all verifiers of the fleet have answered, up to `START_S`."""
        core = self.core
        try:
            async with asyncio.timeout(START_S):
                while core.snapshot is None or not core.links or len(core.ready_links) < len(core.links):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            pass

    def check_fixed(self) -> None:
        """Raises `ConfigError` if a verifier takes no fixed responses."""
        for link in self.core.ready_links:
            if link.welcome is not None and not link.welcome.fixed_responses:
                needed = json.dumps(NEEDED_BY_FIXED)
                raise ConfigError(f"{link.member.id} takes no fixed responses: serve it with --verifier-engine-args '{needed}'")

    # Verifiers that leave

    def _on_look(self) -> None:
        """A drained verifier's requests go on at the others, and its rows are taken."""
        for link in self.core.ready_links:
            incarnation = link.member.incarnation
            if link.member.state == "ready":
                self._drained.discard(incarnation)
            elif link.member.state == "draining":
                moved = self.core.migrate(self.core.sequences.at(link), None, "drain")
                if incarnation not in self._drained:
                    self._drained.add(incarnation)
                    self._note_death(link, "was drained", moved)
                    self._take_rows(link)

    def _on_gone(self, link: VerifierLink, cause: Cause, requests: int) -> None:
        if link.welcome is not None and cause != "closed" and link.member.incarnation not in self._drained:
            silent = f"was silent for {GATEWAY_LEASE_S * PATIENCE:g} s"
            self._note_death(link, silent if cause == "silent" else "was lost", requests)

    def _note_death(self, link: VerifierLink, reason: str, requests: int) -> None:
        self.deaths.append(Death(_number(link.member.id), reason, time.monotonic() - self.began, requests))
        self._say(f"{link.member.id} {reason} in round {self.number}; {requests} requests go on elsewhere")

    # Rows

    def take_rows(self) -> list[asyncio.Future[Any]]:
        """Asks all verifiers for their rows since the last time; done when these have come, or their verifier is lost."""
        return [self._take_rows(link) for link in self.core.ready_links]

    def _on_welcome(self, link: VerifierLink) -> None:
        self.part(link.member.id)
        self._take_rows(link)  # From now on, the verifier keeps rows.

    def _take_rows(self, link: VerifierLink) -> asyncio.Future[Any]:
        rows = link.call("take_rows")
        rows.add_done_callback(partial(self._add_rows, link))
        return rows

    def _add_rows(self, link: VerifierLink, taken: asyncio.Future[Any]) -> None:
        if taken.cancelled() or taken.exception() is not None:
            return
        rows = msgspec.msgpack.decode(taken.result(), type=RowBatch)
        name = link.member.id
        if first := self._first_step.setdefault(link.member.incarnation, self._next_step.get(name, 0)):
            rows.steps = [replace(row, step=row.step + first) for row in rows.steps]
            rows.verifications = [replace(row, step=row.step + first) for row in rows.verifications]
        if rows.steps:
            self._next_step[name] = rows.steps[-1].step + 1
        self.part(name).rows.add(rows)


def _number(verifier_id: str) -> int:
    """3 of `verifier-3`."""
    return int(verifier_id.rpartition("-")[2])
