"""Finds a rollout's verifiers through the coordinator, and talks to them over the engine wire.

The command's process, its main thread.  A worker is one incarnation of a verifier.  When it ends or is drained, the worker is
removed and its rows are kept.  A verifier that is started again, or takes requests again, becomes another worker with the same
number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from backend.config.sources import ConfigError
from backend.coordinator import CoordinatorUnavailable
from backend.coordinator.actor import CoordinatorHandle
from backend.engine.client import EngineClient, EngineRefused
from backend.fleet import Member
from backend.records.kept import RowBatch
from backend.rollout.options import NEEDED_BY_FIXED
from backend.transport import Hub, ServerKeys, Wire

logger = logging.getLogger(__name__)

SILENCE_LIMIT_S = 60.0
"""Seconds without any message after which a verifier counts as hung; it publishes counters four times a second."""

STARVED_S = 10.0
"""Seconds.  A verifier whose lease has expired may merely be starved of CPU time, and a restarted coordinator knows nobody at
first.  So such a verifier is kept while its last message to this client is not older."""

DRAINED, SILENT = "was drained", f"was silent for {SILENCE_LIMIT_S:g} s"
ANSWER_S = 5.0
START_S, REJOIN_S = 120.0, 60.0
"""Seconds that the first verifiers may take to answer; seconds until one that did not answer is tried again."""


@dataclass(eq=False)
class Worker:
    """One incarnation of one verifier."""

    number: int
    """The number in the verifier's name: 3 for `verifier-3`."""
    member: Member
    client: EngineClient
    rows: RowBatch = field(default_factory=RowBatch)
    """Rows of the current round."""
    coordinator: str = ""
    """The last `FleetSnapshot.coordinator` that knew this verifier."""
    first_step: int = 0
    """Added to this incarnation's step numbers, so that they go on after those of the incarnation before."""

    @property
    def name(self) -> str:
        """The verifier's member id, such as `verifier-3`."""
        return self.member.id

    def take_rows(self) -> RowBatch:
        """Adds the rows that have arrived to `rows`, and returns them."""
        batch, self.client.rows = self.client.rows, RowBatch()
        if self.first_step:
            batch.steps = [replace(row, step=row.step + self.first_step) for row in batch.steps]
            batch.verifications = [replace(row, step=row.step + self.first_step) for row in batch.verifications]
        self.rows.add(batch)
        return batch


class Workers:
    """All verifiers that can currently be used."""

    def __init__(
        self,
        coordinator: CoordinatorHandle,
        fleet_keys: ServerKeys | None,
        node_id: str = "",
        lease_s: float = math.inf,
    ) -> None:
        """After `lease_s` seconds without a message from here, verifiers abort this rollout's requests."""
        self.hub = Hub(Wire(fleet_keys, node_id=node_id))
        self.present: dict[str, Worker] = {}
        self._coordinator = coordinator
        self._lease_s = lease_s
        self._next_step: dict[str, int] = {}
        """By verifier name."""
        self._unfit: dict[str, float] = {}
        """When members that did not answer are tried again, by incarnation (monotonic seconds)."""
        self._first_step: dict[str, int] = {}
        """`Worker.first_step` by incarnation."""

    def close(self) -> None:
        self.present.clear()
        self.hub.close()

    def look(self) -> tuple[list[Worker], list[tuple[Worker, str]]]:
        """Updates `present` from the coordinator.  Returns the new workers, and those that have left with the reason."""
        try:
            snapshot = self._coordinator.snapshot()
        except CoordinatorUnavailable:
            return [], self._leave(self._silent())
        verifiers = {view.member.id: view.member for view in snapshot.members if view.member.kind == "verifier"}
        ready = {name: member for name, member in verifiers.items() if member.state == "ready"}
        gone = self._silent()
        for worker in self.present.values():
            member = verifiers.get(worker.name)
            if member is not None:
                worker.coordinator = snapshot.coordinator
            reason = _reason_to_leave(worker, member, snapshot.coordinator)
            if reason is not None and worker not in [each for each, _ in gone]:
                gone.append((worker, reason))
        left = self._leave(gone)
        now = time.monotonic()
        self._unfit |= {worker.member.incarnation: now + REJOIN_S for worker, reason in left if reason == SILENT}
        fit = [each for _, each in sorted(ready.items()) if self._unfit.get(each.incarnation, now) <= now]
        come = [self._join(member) for member in fit if member.id not in self.present]
        return [worker for worker in come if worker is not None], left

    def check_fixed(self) -> None:
        """Raises `ConfigError` if a verifier takes no fixed responses."""
        for each in self.present.values():
            if each.client.welcome is not None and not each.client.welcome.fixed_responses:
                needed = json.dumps(NEEDED_BY_FIXED)
                raise ConfigError(f"{each.name} takes no fixed responses: serve it with --verifier-engine-args '{needed}'")

    @property
    def version(self) -> str:
        """Version of the weights that the verifiers run, as they report it; several versions if they differ."""
        return ", ".join(sorted({each.client.weights.version for each in self.present.values()}))

    def tend(self) -> None:
        """Sends every verifier a ping and asks workers for their rows; to be called once a second."""
        for worker in self.present.values():
            worker.client.ping()
        self.ask_rows()

    def fetch_rows(self) -> None:
        """Fetches all rows that verifiers have kept so far.  A verifier that does not answer is skipped."""
        for worker in self.present.values():
            self._fetch_rows(worker)

    def _fetch_rows(self, worker: Worker) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            worker.client.rows = worker.client.fetch_rows(ANSWER_S)
        worker.take_rows()

    def ask_rows(self) -> None:
        """Asks for rows, except from verifiers that have not answered the last request for rows yet."""
        for worker in self.present.values():
            if not worker.client.rows_awaited:
                worker.client.ask_rows()

    def receive(self) -> None:
        """Takes all messages of verifiers that have arrived."""
        for worker in self.present.values():
            worker.client.receive()

    def _watch(self) -> None:
        """Keeps all verifiers' leases, and takes their messages, while one client waits."""
        self.tend()
        self.receive()

    def _silent(self) -> list[tuple[Worker, str]]:
        late = time.monotonic() - SILENCE_LIMIT_S
        # A verifier that loads weights has reported that it is paused, and sends nothing meanwhile.
        speaking = [each for each in self.present.values() if each.client.stats is None or not each.client.stats.paused]
        return [(each, SILENT) for each in speaking if each.client.heard_at < late]

    def _leave(self, gone: Sequence[tuple[Worker, str]]) -> list[tuple[Worker, str]]:
        for worker, reason in gone:
            if reason == DRAINED:
                for request_id in worker.client.answers:
                    worker.client.abort(request_id)
                self._fetch_rows(worker)
            worker.take_rows()
            steps = [row.step for row in worker.rows.steps]
            self._next_step[worker.name] = max([self._next_step.get(worker.name, 0), *(step + 1 for step in steps)])
            worker.client.close()
            del self.present[worker.name]
        return list(gone)

    def _join(self, member: Member) -> Worker | None:
        """Greets a verifier.  None if it cannot be used now."""
        # While it is waited for, the others' requests stand still.
        patience_s = 2 * ANSWER_S if self.present else START_S
        try:
            address, key = self.hub.wire.route(member), member.server_key
            client = EngineClient(address, "rollout", self._watch, self.hub, key, self._lease_s, True, patience_s)
        except (EngineRefused, TimeoutError, ConnectionError) as error:
            self._refuse(member, error)
            return None
        if client.weights.update < max((each.client.weights.update for each in self.present.values()), default=0):
            client.close()
            self._refuse(member, "it has not loaded the newest weights yet")
            return None
        first_step = self._first_step.setdefault(member.incarnation, self._next_step.get(member.id, 0))
        worker = Worker(int(member.id.rpartition("-")[2]), member, client, first_step=first_step)
        self.present[member.id] = worker
        return worker

    def _refuse(self, member: Member, fault: object) -> None:
        logger.warning("%s cannot be used: %s", member.id, fault)
        self._unfit[member.incarnation] = time.monotonic() + REJOIN_S


def _reason_to_leave(worker: Worker, member: Member | None, coordinator: str) -> str | None:
    """Why a worker leaves, given the coordinator's entry for its name (None: no entry); None if it stays."""
    if member is not None and member.incarnation != worker.member.incarnation:
        return "died"
    if member is not None and member.state != "lost":
        return DRAINED if member.state == "draining" else None
    is_doubtful = member is not None or worker.coordinator != coordinator
    return None if is_doubtful and time.monotonic() - worker.client.heard_at < STARVED_S else "died"
