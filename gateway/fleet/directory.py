"""Tells the gateway which members the fleet has.  Runs in the gateway's event loop; Ray is called in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from backend.coordinator.commands import Answer, AnyCommand
from backend.fleet import FleetSnapshot, Member

if TYPE_CHECKING:
    from backend.coordinator.actor import CoordinatorHandle

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5


class Directory:
    """The fleet's membership, from the coordinator.  It also keeps this gateway's own membership alive.

    `member` is this gateway, registered with the first poll; None: this gateway is no member.
    """

    def __init__(self, handle: CoordinatorHandle, member: Member | None = None) -> None:
        self._handle = handle
        self._member = member
        self._seen_version = 0

    async def snapshot(self) -> FleetSnapshot:
        """The fleet now, for `follow`.  The call also confirms that the caller has acted upon the last answer."""
        answer = await asyncio.to_thread(self._ask)
        self._seen_version = answer.version
        return answer

    async def look(self) -> FleetSnapshot:
        """The fleet now, for display.  Confirms nothing."""
        return await asyncio.to_thread(self._handle.snapshot)

    async def submit(self, command: AnyCommand) -> Answer:
        return await asyncio.to_thread(self._handle.submit, command)

    def _ask(self) -> FleetSnapshot:
        if (member := self._member) is not None:
            orders = self._handle.report(member.id, member.incarnation, None, "ready", self._seen_version)
            if not orders.known:
                self._handle.register(member)
        return self._handle.snapshot()


async def follow(directory: Directory, look: Callable[[FleetSnapshot], None]) -> NoReturn:
    """Calls `look` once or twice a second with the last answer, old or new.

    It is called even while the directory fails or hangs, so that the caller reconnects to members whose connection was lost.
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
