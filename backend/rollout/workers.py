"""Finds a rollout's verifiers through the coordinator, and talks to them over the engine wire.

The command's process, its main thread.  A worker is a connection to one incarnation of a verifier.  When it is lost, or the
verifier is drained, the worker is removed and its rows are kept.  A verifier that is started again, reached again, or takes
requests again becomes another worker with the same number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from backend.config.sources import ConfigError
from backend.coordinator import CoordinatorUnavailable
from backend.coordinator.actor import CoordinatorHandle
from backend.coordinator.policy import LEASE_S
from backend.engine.client import EngineClient, EngineRefused
from backend.fleet import Member
from backend.records.kept import RowBatch
from backend.rollout.options import NEEDED_BY_FIXED
from backend.transport import Hub, ServerKeys, Wire
from backend.wire.engine import GATEWAY_LEASE_S

logger = logging.getLogger(__name__)

SILENCE_LIMIT_S = 60.0
"""Seconds without any message after which a verifier counts as hung; it publishes counters four times a second."""

STARVED_S = 10.0
"""Seconds.  A verifier whose lease has expired may merely be starved of CPU time, and a restarted coordinator knows nobody at
first.  So such a verifier is kept while its last message to this client is not older."""

DRAINED, LOST, SILENT = "was drained", "was lost", f"was silent for {SILENCE_LIMIT_S:g} s"
ANSWER_S = 5.0
START_S, REJOIN_S = 120.0, 60.0
"""Seconds that the first verifiers may take to answer; seconds until one that did not answer is tried again."""
SETTLED_S = LEASE_S + 1
"""Seconds until a lost one is tried again: if it has died, the coordinator knows by then."""


@dataclass(eq=False)
class Worker:
    """One incarnation of one verifier."""

    number: int
    """The number in the verifier's name: 3 for `verifier-3`."""
    member: Member
    client: EngineClient
    rows: RowBatch = field(default_factory=RowBatch)
    """Rows of the current round."""
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

    def __init__(self, coordinator: CoordinatorHandle, fleet_keys: ServerKeys | None, node_id: str = "") -> None:
        self.hub = Hub(Wire(fleet_keys, node_id=node_id))
        self.present: dict[str, Worker] = {}
        self._coordinator = coordinator
        self._next_step: dict[str, int] = {}
        """By verifier name."""
        self._unfit: dict[str, float] = {}
        """When members that did not answer or were lost are tried again, by incarnation (monotonic seconds)."""
        self._first_step: dict[str, int] = {}
        """`Worker.first_step` by incarnation."""

    def close(self) -> None:
        self.present.clear()
        self.hub.close()

    def look(self) -> tuple[list[Worker], list[tuple[Worker, str]]]:
        """Updates `present` from the coordinator.  Returns the new workers, and those that have left with the reason."""
        try:
            members = [view.member for view in self._coordinator.snapshot().members]
        except CoordinatorUnavailable:
            members = [worker.member for worker in self.present.values()]
        verifiers = {member.id: member for member in members if member.kind == "verifier"}
        now = time.monotonic()
        reasons = [(worker, _reason_to_leave(worker, verifiers.get(worker.name), now)) for worker in self.present.values()]
        gone = [(worker, reason) for worker, reason in reasons if reason is not None]
        for worker, reason in gone:
            self._leave(worker, reason)
        ready = [member for _, member in sorted(verifiers.items()) if member.state == "ready"]
        fit = [each for each in ready if self._unfit.get(each.incarnation, now) <= now]
        come = [self._join(member) for member in fit if member.id not in self.present]
        return [worker for worker in come if worker is not None], gone

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
            if not worker.client.rows_awaited:
                worker.client.ask_rows()

    def fetch_rows(self) -> None:
        """Fetches all rows that verifiers have kept so far.  A verifier that does not answer is skipped."""
        for worker in self.present.values():
            self._fetch_rows(worker)

    def _fetch_rows(self, worker: Worker) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            worker.client.rows = worker.client.fetch_rows(ANSWER_S)
        worker.take_rows()

    def receive(self) -> None:
        """Takes all messages of verifiers that have arrived."""
        for worker in self.present.values():
            worker.client.receive()

    def _watch(self) -> None:
        """Keeps all verifiers' leases, and takes their messages, while one client waits."""
        self.tend()
        self.receive()

    def _leave(self, worker: Worker, reason: str) -> None:
        if reason == DRAINED:
            for request_id in worker.client.answers:
                worker.client.abort(request_id)
            self._fetch_rows(worker)
        else:
            self._unfit[worker.member.incarnation] = time.monotonic() + (SETTLED_S if reason == LOST else REJOIN_S)
        worker.take_rows()
        steps = [row.step for row in worker.rows.steps]
        self._next_step[worker.name] = max([self._next_step.get(worker.name, 0), *(step + 1 for step in steps)])
        worker.client.close()
        del self.present[worker.name]

    def _join(self, member: Member) -> Worker | None:
        """Greets a verifier.  None if it cannot be used now."""
        # While it is waited for, the others' requests stand still.
        patience_s = 2 * ANSWER_S if self.present else START_S
        try:
            address, key = self.hub.wire.route(member), member.server_key
            client = EngineClient(address, "rollout", self._watch, self.hub, key, GATEWAY_LEASE_S, True, patience_s)
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


def _reason_to_leave(worker: Worker, member: Member | None, now: float) -> str | None:
    """Why a worker leaves, given the coordinator's entry for its name (None: no entry); None if it stays."""
    client = worker.client
    if client.is_cut or (member is not None and member.incarnation != worker.member.incarnation):
        return LOST
    if member is None or member.state == "lost":
        return LOST if now - client.heard_at >= STARVED_S else None
    if member.state == "draining":
        return DRAINED
    # A verifier that loads weights has reported that it is paused, and sends nothing meanwhile.
    is_paused = client.stats is not None and client.stats.paused
    return SILENT if now - client.heard_at > SILENCE_LIMIT_S and not is_paused else None
