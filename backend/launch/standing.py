"""What administrators asked for and still holds, kept for a coordinator that has forgotten it.  Pure; the operator's.

Drains and pins live in the coordinator's memory.  When Ray has restarted it, its snapshots carry another name: then everything
remembered is asked for again, as soon as the members it is about have registered.
"""

from __future__ import annotations

from backend.coordinator.commands import Assign, Drain
from backend.fleet import FleetSnapshot


class Standing:
    """Shown every snapshot, in order."""

    def __init__(self) -> None:
        self._coordinator = ""
        self._held: dict[str, Drain | Assign] = {}
        """By member: a verifier or drafter may be drained, a drafter may be pinned too, which goes under `pin of ...`."""
        self._owed: dict[str, Drain | Assign] = {}

    def repeat(self, snapshot: FleetSnapshot) -> list[Drain | Assign]:
        """What is to be asked of the coordinator again; mostly nothing."""
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
        view.member.id: Drain(member=view.member.id, migrate=view.drain.migrate, force=True)
        for view in snapshot.members
        if view.drain is not None and view.drain.ordered
    }
    for drafter, verifiers in snapshot.pins.items():
        held[f"pin of {drafter}"] = Assign(drafter=drafter, verifiers=verifiers)
    return held
