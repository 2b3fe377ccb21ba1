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
from pathlib import Path

from msgspec.structs import replace

from backend.config.sources import CommandError, ConfigError
from backend.coordinator import CoordinatorUnavailable
from backend.coordinator.actor import CoordinatorHandle
from backend.engine.client import PING_EVERY_S, EngineClient, EngineRefused
from backend.fleet import Member
from backend.fleet.stats import Weights
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
LOAD_S = 600.0
"""Seconds that a restarted verifier may take to load the weights that the others have."""


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


@dataclass
class _CatchingUp:
    """A verifier that loads the weights that the others have; meanwhile they go on."""

    member: Member
    client: EngineClient
    update: int
    """The `Weights.update` that it loads."""
    call: int
    """Key of the call's result."""
    deadline: float


class Workers:
    """All verifiers that can currently be used."""

    def __init__(
        self,
        coordinator: CoordinatorHandle,
        fleet_keys: ServerKeys | None,
        node_id: str = "",
        target_dir: str = "",
        lease_s: float = math.inf,
    ) -> None:
        """After `lease_s` seconds without a message from here, verifiers abort this rollout's requests."""
        self.weights = Weights(path=target_dir)
        """The weights that all verifiers should have; gateways of a fleet that the rollout has joined may change them, too."""
        self.hub = Hub(Wire(fleet_keys, node_id=node_id))
        self.present: dict[str, Worker] = {}
        self._catching_up: dict[str, _CatchingUp] = {}
        """By member id."""
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
        self._catching_up.clear()
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
        for name in self._catching_up.keys() - verifiers.keys():
            self._catching_up.pop(name).client.close()
        now = time.monotonic()
        self._unfit |= {worker.member.incarnation: now + REJOIN_S for worker, reason in left if reason == SILENT}
        fit = [each for _, each in sorted(ready.items()) if self._unfit.get(each.incarnation, now) <= now]
        come = [self._join(member) for member in fit if member.id not in self.present]
        return [worker for worker in come if worker is not None], left

    @property
    def is_catching_up(self) -> bool:
        """Whether a verifier is loading the newest weights before it can be used."""
        return bool(self._catching_up)

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

    def refresh(self) -> None:
        """Learns which weights the verifiers have now; one that has forgotten this rollout is greeted."""
        self.fetch_rows()
        self._learn()

    def load(self, path: Path) -> str:
        """Makes all verifiers load the weights in a directory; returns why they keep the earlier ones, or "".

        Raises `CommandError` if only some have loaded them, and the earlier ones cannot be loaded again.
        """
        before, wanted = self.weights, Weights(self.weights.update + 1, path.name, str(path))
        faults = self._renew(wanted)
        if not faults:
            self.weights = wanted
            return ""
        self.weights = before  # A verifier that was lost meanwhile may have reported the new ones.
        if len(faults) < len(self.present) or any(each.update == wanted.update for each in self._catching_up.values()):
            # Only some have loaded them.  A round must not mix weights, so all go back to the earlier ones.
            if before.path is None:
                raise CommandError(f"{path}: not all verifiers could load it, and the weights before came as tensors: {faults}")
            self.weights = replace(before, update=wanted.update + 1)
            faults |= self._renew(self.weights)
        return "; ".join(f"{name}: {fault}" for name, fault in sorted(faults.items()))

    def _renew(self, wanted: Weights) -> dict[str, str]:
        """Asks all verifiers to load these weights; returns, when all have answered, the failures by verifier name."""
        calls: dict[Worker, int] = {}
        pinged = 0.0
        while True:
            for worker in self.present.values():
                if worker.client.is_cut:
                    # The call or its answer may be lost.
                    worker.client.mend()
                    calls.pop(worker, None)
                if worker not in calls:
                    calls[worker] = worker.client.call("reload_weights", wanted.path, wanted.version, wanted.update)
            if all(calls[each] in each.client.results for each in self.present.values()):
                break
            if time.monotonic() - pinged > PING_EVERY_S:
                # Verifiers that have loaded them already must not forget this rollout meanwhile.
                pinged = time.monotonic()
                self.tend()
            self.hub.poll(PING_EVERY_S)
            self.receive()
            self.look()
        results = {each.name: each.client.results[calls[each]] for each in self.present.values()}
        return {name: fault for name, fault in results.items() if fault is not None}

    def tend(self) -> None:
        """Sends every verifier a ping and asks workers for their rows; to be called once a second."""
        for client in self._clients():
            client.ping()
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
        for client in self._clients():
            client.receive()

    def _clients(self) -> list[EngineClient]:
        return [worker.client for worker in self.present.values()] + [waits.client for waits in self._catching_up.values()]

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
        """Greets a verifier.  None if it must catch up first, goes on catching up, or cannot be used."""
        waits = self._catching_up.get(member.id)
        if waits is not None:
            if waits.member.incarnation == member.incarnation:
                return self._caught_up(waits)
            self._catching_up.pop(member.id).client.close()
        # While it is waited for, the others' requests stand still.
        patience_s = 2 * ANSWER_S if self.present else START_S
        try:
            address, key = self.hub.wire.route(member), member.server_key
            client = EngineClient(address, "rollout", self._watch, self.hub, key, self._lease_s, True, patience_s)
        except (EngineRefused, TimeoutError, ConnectionError) as error:
            self._refuse(member, error)
            return None
        self._learn(client)
        return self._go_on(member, client, client.weights.update)

    def _caught_up(self, waits: _CatchingUp) -> Worker | None:
        """The worker, once it has loaded the newest weights."""
        client = waits.client
        if client.is_cut:
            fault: str | None = "the connection was cut"
        elif waits.call in client.results:
            fault = client.results[waits.call]
        elif time.monotonic() > waits.deadline:
            fault = f"it has not loaded the newest weights within {LOAD_S:g} s"
        else:
            return None
        del self._catching_up[waits.member.id]
        if fault is not None:
            client.close()
            self._refuse(waits.member, fault)
            return None
        self._learn()
        return self._go_on(waits.member, client, waits.update)

    def _refuse(self, member: Member, fault: object) -> None:
        logger.warning("%s cannot be used: %s", member.id, fault)
        self._unfit[member.incarnation] = time.monotonic() + REJOIN_S

    def _go_on(self, member: Member, client: EngineClient, update: int) -> Worker | None:
        """Makes a verifier a worker; or has it load the newest weights, if those of `update` are older."""
        if update != self.weights.update:
            if self.weights.path is None:
                client.close()
                self._refuse(member, "it has not the newest weights, which came as tensors")
                return None
            wanted, deadline = self.weights, time.monotonic() + LOAD_S
            call = client.call("catch_up", wanted.path, wanted.version, wanted.update)
            self._catching_up[member.id] = _CatchingUp(member, client, wanted.update, call, deadline)
            return None
        first_step = self._first_step.setdefault(member.incarnation, self._next_step.get(member.id, 0))
        worker = Worker(int(member.id.rpartition("-")[2]), member, client, first_step=first_step)
        self.present[member.id] = worker
        return worker

    def _learn(self, *clients: EngineClient) -> None:
        reported = (each.weights for each in (*clients, *(worker.client for worker in self.present.values())))
        self.weights = max(self.weights, *reported, key=lambda each: each.update)


def _reason_to_leave(worker: Worker, member: Member | None, coordinator: str) -> str | None:
    """Why a worker leaves, given the coordinator's entry for its name (None: no entry); None if it stays."""
    if member is not None and member.incarnation != worker.member.incarnation:
        return "died"
    if member is not None and member.state != "lost":
        return DRAINED if member.state == "draining" else None
    is_doubtful = member is not None or worker.coordinator != coordinator
    return None if is_doubtful and time.monotonic() - worker.client.heard_at < STARVED_S else "died"
