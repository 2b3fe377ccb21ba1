"""Carries out administrators' commands as far as the coordinator can, and queues the rest for the launcher.  Pure.

Drains and pins are changes of the policy's state.  Commands about processes (`add`, `remove`, `restart`, `swap-drafter`) become
an `Operation`: the launcher takes the oldest, reports its progress, and takes the next.  Runs in the coordinator actor, one
call at a time.  So the fleet cannot change between the check of a command, `if_version` included, and its effect.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from backend.coordinator.commands import (
    Add,
    Answer,
    AnyCommand,
    Assign,
    CommandRefused,
    Done,
    Drain,
    Reason,
    Remove,
    Restart,
    Resume,
    SwapDrafter,
)
from backend.coordinator.policy import Coordinator
from backend.fleet import FleetSnapshot, MemberKind, MemberView, Operation

KEPT = 20
"""Ended operations that are still shown; older ones are forgotten."""
MOST_AT_ONCE = 16
"""Most members that one command may add."""


class _Refusal(Exception):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Administration:
    """Takes commands for one `Coordinator`.

    `deadline_s`: for commands that name none.  `name`: differs for each start of the coordinator's process.
    """

    def __init__(self, policy: Coordinator, deadline_s: float, has_drafters: bool, name: str = "") -> None:
        self._policy = policy
        self._name = name
        self._deadline_s = deadline_s
        self._has_drafters = has_drafters
        self._operations: dict[int, Operation] = {}
        self._takes: dict[type[AnyCommand], Callable[[Any, FleetSnapshot, float], Done]] = {
            Drain: self._drain,
            Resume: self._resume,
            Remove: self._remove,
            Add: self._add,
            Assign: self._assign,
            Restart: self._restart,
            SwapDrafter: self._swap,
        }

    @property
    def operations(self) -> list[Operation]:
        """Operations that wait or run, and the last `KEPT` that ended; the newest last."""
        return list(self._operations.values())

    def snapshot(self, now: float) -> FleetSnapshot:
        """The fleet at `now`, with pins and operations."""
        fleet = self._policy.snapshot(now)
        pins = dict(self._policy.pins)
        return msgspec.structs.replace(fleet, pins=pins, operations=self.operations, coordinator=self._name)

    def next_operation(self) -> Operation | None:
        """The operation that the launcher has to work on: the running one, or else the oldest that waits."""
        return next((each for each in self._operations.values() if each.state in ("running", "waiting")), None)

    def progress(self, report: Operation) -> None:
        """Takes an operation as the launcher reports it.  Ignored if the operation is not known any more."""
        if report.id not in self._operations:
            return
        self._operations[report.id] = report
        ended = [each.id for each in self._operations.values() if each.state in ("done", "failed")]
        for old in ended[: max(len(ended) - KEPT, 0)]:
            del self._operations[old]

    def submit(self, command: AnyCommand, now: float) -> Answer:
        """Takes a command, or refuses it with a reason."""
        fleet = self._policy.snapshot(now)
        try:
            if command.if_version is not None and command.if_version != fleet.version:
                raise _Refusal("version_mismatch", f"the fleet is at version {fleet.version}, not {command.if_version}")
            return self._takes[type(command)](command, fleet, now)
        except _Refusal as refusal:
            return CommandRefused(refusal.reason, str(refusal), fleet.version)

    # One method per command: checks it, describes its effects, and carries it out unless it is a dry run.

    def _drain(self, command: Drain, fleet: FleetSnapshot, now: float) -> Done:
        view = _member(fleet, command.member)
        _check_deadline(command.deadline_s)
        if not command.force:
            self._check_others_serve(fleet, command.member)
        after_s = 0.0 if command.migrate else command.deadline_s
        effects = [] if view.drain is not None else [f"{command.member} takes no new work"]
        moving = view.drain is not None and view.drain.migrate
        if view.member.kind == "verifier" and after_s is not None and not moving:
            effects.append(f"its requests are moved {'now' if not after_s else f'after {after_s:g} s'}")
        if not command.dry_run and effects:
            self._policy.drain(command.member, now, after_s)
        return self._done_answer(effects, now)

    def _resume(self, command: Resume, fleet: FleetSnapshot, now: float) -> Done:
        view = _member(fleet, command.member)
        effects = [f"{command.member} takes work again"] if view.drain is not None else []
        if effects:
            self._check_idle([command.member])
        if not command.dry_run:
            self._policy.resume(command.member, now)
        return self._done_answer(effects, now)

    def _remove(self, command: Remove, fleet: FleetSnapshot, now: float) -> Done:
        view = _member(fleet, command.member)
        pending = self._pending(command.member)
        if pending is not None and pending.kind == "remove":
            return Done(fleet.version, [], pending.id)
        self._check_idle([command.member])
        if not command.force:
            self._check_others_serve(fleet, command.member)
        effects = [f"{command.member} takes no new work", f"process {view.member.pid} ends when its requests have"]
        return self._queue(command, fleet, effects, kind="remove", members=[command.member], **self._manner(command))

    def _add(self, command: Add, fleet: FleetSnapshot, now: float) -> Done:
        if not 1 <= command.count <= MOST_AT_ONCE:
            raise _Refusal("invalid", f"count must be between 1 and {MOST_AT_ONCE}")
        if command.kind == "drafter" and not self._has_drafters:
            raise _Refusal("invalid", "the fleet's mode drafts without drafters of its own")
        plural = "s" if command.count > 1 else ""
        effects = [f"{command.count} {command.kind}{plural} started"]
        return self._queue(command, fleet, effects, kind="add", members=[""] * command.count, add=command.kind)

    def _assign(self, command: Assign, fleet: FleetSnapshot, now: float) -> Done:
        _member(fleet, command.drafter, "drafter")
        for verifier in command.verifiers or ():
            _member(fleet, verifier, "verifier")
        wanted = None if command.verifiers is None else sorted(set(command.verifiers))
        if wanted == self._policy.pins.get(command.drafter):
            return Done(fleet.version, [])
        if wanted is None:
            effects = [f"{command.drafter} goes where the policy sends it"]
        else:
            effects = [f"{command.drafter} serves {' and '.join(wanted) or 'nobody'}, and stays there"]
        if not command.dry_run:
            self._policy.pin(command.drafter, wanted, now)
        return self._done_answer(effects, now)

    def _restart(self, command: Restart, fleet: FleetSnapshot, now: float) -> Done:
        everyone = [v.member.id for v in fleet.members if v.member.kind != "gateway" and v.member.state != "lost"]
        members = everyone if command.members is None else command.members
        if not members:
            raise _Refusal("invalid", "there is nobody to restart")
        for member in members:
            _member(fleet, member)
            # Members restart one at a time, so all others serve meanwhile.
            if not command.force:
                self._check_others_serve(fleet, member)
        self._check_idle(members)
        effects = [f"{member} is drained, ended and started again" for member in members]
        return self._queue(command, fleet, effects, kind="restart", members=list(members), **self._manner(command))

    def _swap(self, command: SwapDrafter, fleet: FleetSnapshot, now: float) -> Done:
        _member(fleet, command.drafter, "drafter")
        if not command.path:
            raise _Refusal("invalid", "path must name a directory")
        self._check_idle([command.drafter])
        effects = [f"{command.drafter} drafts with another head, if it fits"]
        return self._queue(command, fleet, effects, kind="swap-drafter", members=[command.drafter], path=command.path)

    # Details.

    def _done_answer(self, effects: list[str], now: float) -> Done:
        return Done(self._policy.snapshot(now).version, effects)

    def _queue(self, command: AnyCommand, fleet: FleetSnapshot, effects: list[str], **fields: Any) -> Done:
        if command.dry_run:
            return Done(fleet.version, effects)
        # The version changes, since a command based on the earlier one does not take this operation into account.
        version = self._policy.changed()
        # A restarted coordinator has higher versions, so reports on its predecessor's operations name none of its own.
        self._operations[version] = Operation(version, **fields)
        return Done(version, effects, version)

    def _manner(self, command: Remove | Restart) -> dict[str, Any]:
        _check_deadline(command.deadline_s)
        deadline_s = self._deadline_s if command.deadline_s is None else command.deadline_s
        return {"migrate": command.migrate, "deadline_s": deadline_s, "force": command.force}

    def _pending(self, member: str) -> Operation | None:
        return next((o for o in self._operations.values() if o.state in ("waiting", "running") and member in o.members), None)

    def _check_idle(self, members: Sequence[str]) -> None:
        for member in members:
            pending = self._pending(member)
            if pending is not None:
                raise _Refusal("conflict", f"{member} is part of operation {pending.id} ({pending.kind})")

    def _check_others_serve(self, fleet: FleetSnapshot, leaving: str) -> None:
        """Refuses a command that would leave no verifier that takes requests, once the removals that wait are carried out."""
        serving = [v.member.id for v in fleet.members if v.member.kind == "verifier" and v.member.state == "ready"]
        others = [each for each in serving if (o := self._pending(each)) is None or o.kind != "remove"]
        if leaving in serving and not set(others) - {leaving}:
            raise _Refusal("last_verifier", f"{leaving} is the last verifier that takes requests; force does it all the same")


def _member(fleet: FleetSnapshot, member_id: str, kind: MemberKind | None = None) -> MemberView:
    """The member of that id and kind (None: verifier or drafter); refuses the command if there is none."""
    fitting = [view for view in fleet.members if view.member.kind == kind or (kind is None and view.member.kind != "gateway")]
    found = next((view for view in fitting if view.member.id == member_id), None)
    if found is not None:
        return found
    what = kind or "verifier or drafter"
    there = ", ".join(view.member.id for view in fitting) or "none"
    raise _Refusal("unknown_member", f"no {what} {member_id!r}; there is {there}")


def _check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and not 0 <= deadline_s < float("inf"):
        raise _Refusal("invalid", "deadline_s must be zero or more")
