"""Carries out administrators' operations: members added, removed, restarted; heads swapped.

A thread of the launcher's process.  It fetches the oldest operation from the coordinator, carries it out while reporting its
progress, then fetches the next: one change at a time.  It ends a member only when every gateway knows of the drain and the
member's own counters show no work left, so no request is lost.  Between operations it starts lost members again.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import ray
import ray.exceptions

from backend.config.sources import Say
from backend.coordinator import CoordinatorUnavailable
from backend.fleet import FleetSnapshot, Operation, OperationState
from backend.launch.emptying import Emptying
from backend.launch.fleet import LaunchedFleet
from backend.launch.plan import LaunchError
from backend.launch.processes import Started, cause

logger = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.25
JOIN_S = 5.0
SWAP_TIMEOUT_S = 300.0
AWAY_LIMIT_S = 30.0
"""Seconds that the coordinator may be unreachable in the middle of an operation before the operation fails."""
ABSENT_S = 30.0
"""Seconds between two attempts to start a lost member again."""


class _Stopped(Exception):
    """The fleet is ending."""


class Operator:
    """Carries out one fleet's operations until `stop`."""

    def __init__(self, fleet: LaunchedFleet, say: Say) -> None:
        self._fleet = fleet
        self._coordinator = fleet.coordinator
        self._say = say
        self._seen: FleetSnapshot | None = None
        """The coordinator's latest snapshot."""
        self._reported: Operation
        """The operation under way, as reported last."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def start(self) -> None:
        """Begins; the end of the fleet begins with `stop`."""
        self._thread.start()
        self._fleet.ending.callback(self.stop)

    def stop(self) -> None:
        """Stops the thread, if need be in the middle of an operation; waits up to `JOIN_S`."""
        self._stopping.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self._revive(self._remind(), time.monotonic())
                operation = self._coordinator.progress()
                if operation is not None:
                    self._carry_out(operation)
            except (CoordinatorUnavailable, LaunchError) as error:
                # A `LaunchError`: the coordinator could not be told how an operation ended.
                logger.debug("no operations: %s", error)
            except _Stopped:
                return

    def _carry_out(self, operation: Operation) -> None:
        steps = {"add": self._add, "remove": self._remove, "restart": self._restart, "swap-drafter": self._swap}
        self._reported = operation
        self._tell("begun")
        try:
            note = steps[operation.kind](operation)
        except LaunchError as error:
            self._close_operation("failed", str(error))
        except (ray.exceptions.RayError, ValueError) as error:
            # One failed operation must not end the operator.
            logger.exception("operation %d (%s) failed", operation.id, operation.kind)
            self._close_operation("failed", cause(error))
        else:
            self._close_operation("done", note)

    # The operations; each returns the note that is printed at its end.

    def _add(self, operation: Operation) -> str:
        assert operation.add is not None
        started: list[Started] = []
        try:
            for _ in operation.members:
                started.append(self._fleet.add(operation.add))
                names = [member.member_id for member in started]
                self._tell(f"starting {', '.join(names)}", members=names)
                if started[-1].plan.may_share(started[-1].plan):
                    self._wait_ready(started)  # the next one would count the memory that this one still takes
            self._wait_ready(started)
        except LaunchError:
            for member in started:
                self._fleet.end(member.member_id)
            raise
        return f"{', '.join(names)} started"

    def _remove(self, operation: Operation) -> str:
        (member_id,) = operation.members
        self._empty(operation, member_id)
        self._fleet.end(member_id)
        # A drain holds for later processes of this name, and `add` may use the name again.
        self._resume(member_id)
        return f"{member_id} removed"

    def _restart(self, operation: Operation) -> str:
        for member_id in operation.members:
            plan = self._own(member_id).plan
            try:
                self._empty(operation, member_id)
                self._tell(f"starting {member_id} again")
                self._fleet.end(member_id, keep_room=True)
                self._wait_ready([self._fleet.start(plan)])
            finally:
                # A drain holds for later processes of this name: one that comes back after a failure gets requests too.
                self._resume(member_id)
        return f"{', '.join(operation.members)} restarted"

    def _swap(self, operation: Operation) -> str:
        (member_id,) = operation.members
        self._tell("loading the head")
        refusal = ray.get(self._own(member_id).actor.swap_head.remote(operation.path), timeout=SWAP_TIMEOUT_S)
        if refusal:
            raise LaunchError(f"{member_id} keeps its head: {refusal}")
        return f"{member_id} drafts with another head"

    # Steps that the operations share.

    def _empty(self, operation: Operation, member_id: str) -> None:
        """Drains a member; returns when it has nothing left to do, or with `force` at the operation's deadline."""
        member = self._own(member_id)
        self._tell(f"draining {member_id}")
        migrate_after_s = 0.0 if operation.migrate else operation.deadline_s
        self._patiently(lambda: self._coordinator.drain(member_id, migrate_after_s))
        emptying = Emptying(member_id, self._patiently(self._coordinator.snapshot).version)
        deadline = time.monotonic() + operation.deadline_s
        while True:
            snapshot = self._patiently(self._remind)
            if emptying.is_over(snapshot, time.monotonic()) or (operation.force and time.monotonic() > deadline):
                return
            if snapshot.view(member_id) is None and member.death() is not None:
                return
            self._tell(f"draining {member_id}: {emptying.requests(snapshot)} requests left")
            if self._stopping.wait(POLL_S):
                raise _Stopped

    def _resume(self, member_id: str) -> None:
        """Ends a member's drain.  A restarted coordinator is told of the drain first: told later, it would keep it."""
        self._patiently(self._remind)
        self._patiently(partial(self._coordinator.resume, member_id))

    def _own(self, member_id: str) -> Started:
        if member_id not in self._fleet.members:
            raise LaunchError(f"{member_id} is not one of this launcher's members")
        return self._fleet.members[member_id]

    def _wait_ready(self, started: list[Started]) -> None:
        def is_stopping() -> bool:
            # A model may load for minutes, and other members' drains must hold meanwhile.
            with contextlib.suppress(CoordinatorUnavailable):
                self._remind()
            return self._stopping.is_set()

        self._fleet.wait_ready(self._say, started, unless=is_stopping)
        if self._stopping.is_set():
            raise _Stopped

    def _patiently(self, call: Callable[[], T]) -> T:
        """Result of `call`, which is repeated while the coordinator is unreachable: Ray restarts it."""
        deadline = time.monotonic() + AWAY_LIMIT_S
        while True:
            try:
                return call()
            except CoordinatorUnavailable as error:
                if time.monotonic() > deadline:
                    raise LaunchError(str(error)) from error
            if self._stopping.wait(POLL_S):
                raise _Stopped

    def _remind(self) -> FleetSnapshot:
        """Tells a coordinator that was restarted the drains and pins that it has lost; returns its snapshot."""
        snapshot, before = self._coordinator.snapshot(), self._seen
        if before is None or snapshot.coordinator == before.coordinator:
            self._seen = snapshot
        else:
            self._coordinator.restore(before)
            self._seen = msgspec.structs.replace(before, coordinator=snapshot.coordinator)
            logger.info("the coordinator was restarted, and told its drains and pins again")
        return snapshot

    def _revive(self, snapshot: FleetSnapshot, now: float) -> None:
        """Starts members again, in their rooms, whose constructors raised when Ray restarted them.

        Ray has given such an actor up.  It is looked for only once the coordinator has forgotten it.
        """
        for member_id, member in list(self._fleet.members.items()):
            is_due = snapshot.view(member_id) is None and now >= member.began + ABSENT_S
            if not is_due or (why := member.death()) is None:
                continue
            member.began = now
            self._say(f"{member_id} was lost, and is started again: {why}")
            try:
                # It counts as ready, so that it may leave the fleet in order when it is ended.
                self._fleet.start(member.plan).ready = True
            except (LaunchError, ray.exceptions.RayError, ValueError) as error:
                self._say(f"{member_id} cannot be started again: {cause(error)}")

    def _tell(self, note: str, **changes: Any) -> None:
        self._reported = msgspec.structs.replace(self._reported, state="running", note=note, **changes)
        with contextlib.suppress(CoordinatorUnavailable):
            self._coordinator.progress(self._reported)

    def _close_operation(self, state: OperationState, note: str) -> None:
        self._say(note if state == "done" else f"{self._reported.kind}: {note}")
        ended = msgspec.structs.replace(self._reported, state=state, note=note)
        self._patiently(lambda: self._coordinator.progress(ended))
