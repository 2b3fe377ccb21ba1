"""A fleet's directory with members that a test sets.  Tests only."""

from __future__ import annotations

from collections.abc import Sequence

from backend.coordinator.commands import Answer, AnyCommand, CommandRefused
from backend.fleet import FleetSnapshot, Member, MemberView


class StaticDirectory:
    """Implements `Directory` of `gateway/fleet/directory.py`, without a coordinator."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._version = 0
        self.members: list[Member] = []
        self.set_members(members)

    def set_members(self, members: Sequence[Member]) -> None:
        self._version += 1
        self.members = list(members)

    async def snapshot(self) -> FleetSnapshot:
        views = [MemberView(member, 0.0) for member in self.members]
        return FleetSnapshot(self._version, views, [], {})

    async def look(self) -> FleetSnapshot:
        return await self.snapshot()

    async def submit(self, command: AnyCommand) -> Answer:
        return CommandRefused("invalid", "this fleet has no coordinator", self._version)
