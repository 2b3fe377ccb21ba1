"""Where the gateway learns who is in the fleet.  Runs in the gateway's event loop; Ray is called in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from backend.fleet import FleetSnapshot, Member, MemberView

if TYPE_CHECKING:
    from backend.coordinator.actor import CoordinatorHandle

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5


class Directory(Protocol):
    """The fleet's membership.  Asked about twice a second; whatever it raises leaves the last answer standing."""

    async def snapshot(self) -> FleetSnapshot:
        """The fleet now."""
        ...


async def follow(directory: Directory, look: Callable[[FleetSnapshot], None]) -> NoReturn:
    """Calls `look` with the last answer, old or new, all the time.

    A directory that fails or hangs must not keep anyone from coming back to members that were lost sight of.
    """
    asking: asyncio.Future[FleetSnapshot] | None = None
    last: FleetSnapshot | None = None
    failing = False
    try:
        while True:
            asking = asking or asyncio.ensure_future(directory.snapshot())
            await asyncio.wait({asking}, timeout=POLL_INTERVAL_S)
            if asking.done():
                error = asking.exception()
                if error is None:
                    last = asking.result()
                elif not failing:
                    logger.warning("the fleet directory does not answer: %s", type(error).__name__)
                asking, failing = None, error is not None
            if last is not None:
                look(last)
            await asyncio.sleep(POLL_INTERVAL_S)
    finally:
        if asking is not None:
            asking.cancel()


class StaticDirectory:
    """A directory that is told its members: tests, and fleets without a coordinator."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._version = 0
        self._members: list[Member] = []
        self.set_members(members)

    def set_members(self, members: Sequence[Member]) -> None:
        """Replaces the membership."""
        self._version += 1
        self._members = list(members)

    async def snapshot(self) -> FleetSnapshot:
        views = [MemberView(member, 0.0) for member in self._members]
        return FleetSnapshot(self._version, views, [], {})


class CoordinatorDirectory:
    """The coordinator's view of the fleet; it also keeps this gateway's own membership alive.

    `member` is this gateway; it is registered with the first poll.  None leaves it out of the fleet.
    """

    def __init__(self, handle: CoordinatorHandle, member: Member | None = None) -> None:
        self._handle = handle
        self._member = member

    async def snapshot(self) -> FleetSnapshot:
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> FleetSnapshot:
        if self._member is not None:
            orders = self._handle.report(self._member.id, self._member.incarnation, None, "ready")
            if not orders.known:
                self._handle.register(self._member)
        return self._handle.snapshot()
