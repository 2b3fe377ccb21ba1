"""Remembers the drains and pins in force, and repeats them to a coordinator that was restarted.  Pure; used by the operator.

Drains and pins live in the coordinator's memory.  After Ray has restarted the coordinator, its snapshots carry another name.
Then each remembered command is sent again, as soon as the members that it names have registered.
"""

from backend.coordinator.commands import Assign, Drain
from backend.fleet import FleetSnapshot


class Standing:
    """Must be given every snapshot, in order."""

    def __init__(self) -> None:
        self._coordinator = ""
        self._held: dict[str, Drain | Assign] = {}
        """Commands in force.  A drain is under its member's id, a drafter's pin under `pin of <drafter>`."""
        self._owed: dict[str, Drain | Assign] = {}

    def repeat(self, snapshot: FleetSnapshot) -> list[Drain | Assign]:
        """The commands to submit to the coordinator again; empty unless it was restarted."""
        if snapshot.coordinator != self._coordinator:
            self._owed = dict(self._held)
            self._coordinator = snapshot.coordinator
        registered = {view.member.id for view in snapshot.members}
        due = {key: command for key, command in self._owed.items() if _about(command) <= registered}
        for key in due:
            del self._owed[key]
        self._held = _standing(snapshot) | self._owed | due
        return list(due.values())


def _about(command: Drain | Assign) -> set[str]:
    if isinstance(command, Drain):
        return {command.member}
    return {command.drafter, *(command.verifiers or ())}


def _standing(snapshot: FleetSnapshot) -> dict[str, Drain | Assign]:
    held: dict[str, Drain | Assign] = {
        view.member.id: Drain(member=view.member.id, migrate=view.drain.migrate, deadline_s=view.drain.deadline_s, force=True)
        for view in snapshot.members
        if view.drain is not None and view.drain.ordered
    }
    for drafter, verifiers in snapshot.pins.items():
        held[f"pin of {drafter}"] = Assign(drafter=drafter, verifiers=verifiers)
    return held
