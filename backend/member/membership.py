"""How a member stays part of the fleet: registers, reports a few times a second, passes on its orders.

Runs as one thread of the member's process.  The coordinator may be away for as long as it likes: the member serves on with its
last orders and registers again when the coordinator is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from backend.coordinator.messages import CoordinatorUnavailable, Credentials
from backend.fleet import DrafterStats, Member, MemberState, Orders, VerifierStats

logger = logging.getLogger(__name__)

ENTER_LIMIT_S = 300.0
"""Seconds a starting member waits for a coordinator that is away."""
RETRY_S = 0.2
REPORT_EVERY_S = 0.25


class Coordinator(Protocol):
    """The part of `CoordinatorHandle` that a member uses."""

    def register(self, member: Member) -> Credentials: ...

    def report(
        self, member_id: str, incarnation: str, stats: VerifierStats | DrafterStats | None, state: MemberState
    ) -> Orders: ...

    def deregister(self, member_id: str, incarnation: str) -> None: ...


def enter(coordinator: Coordinator, member: Member, limit_s: float = ENTER_LIMIT_S) -> Credentials:
    """Registers a process that has just started, as soon as the coordinator can be reached.

    Ray restarts an actor that dies, but not one whose constructor raises: a member that happens to start while the coordinator
    is being restarted must not be lost.  Raises `CoordinatorUnavailable` after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return coordinator.register(member)
        except CoordinatorUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("coordinator is away (%s); waiting for it to register", error)
            time.sleep(RETRY_S)


class Membership:
    """One member's standing with the coordinator.

    `read_stats` is called on this object's thread; so is `obey`, with the orders of every report.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        member: Member,
        read_stats: Callable[[], VerifierStats | DrafterStats | None],
        obey: Callable[[Orders], None],
        interval_s: float = REPORT_EVERY_S,
    ) -> None:
        self._coordinator = coordinator
        self._member = member
        self._interval_s = interval_s
        self._read_stats = read_stats
        self._obey = obey
        self._registered = _route(member)
        self._away = False
        self._retiring = False
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def join_fleet(self) -> None:
        """Starts reporting."""
        self._thread.start()

    def leave_fleet(self) -> None:
        """Stops reporting and says goodbye."""
        self._leave.set()
        self._thread.join(timeout=5)
        try:
            self._coordinator.deregister(self._member.id, self._member.incarnation)
        except CoordinatorUnavailable:
            logger.info("left without a goodbye: the coordinator is away")

    def become(self, state: MemberState, address: str | None = None) -> None:
        """Changes the state (and the address) that the next report carries."""
        self._member = msgspec.structs.replace(
            self._member, state=state, address=self._member.address if address is None else address
        )

    def take_head(self, head: str, takes_features: bool) -> None:
        """A drafter drafts with another head or draft model from now on."""
        self._member = msgspec.structs.replace(self._member, head=head, takes_features=takes_features)

    def drain(self, ordered: bool) -> None:
        """Between `ready` and `draining`, as ordered; a member that starts goes on starting."""
        state = self._member.state
        if state in ("ready", "draining"):
            self.become("draining" if ordered or self._retiring else "ready")

    def retire(self) -> None:
        """Drains for good, whatever is ordered: this process is about to end."""
        self._retiring = True
        self.drain(ordered=True)

    def _run(self) -> None:
        while not self._leave.wait(self._interval_s):
            try:
                self._report()
                self._away = False
            except CoordinatorUnavailable as error:
                if not self._away:
                    logger.warning("coordinator is away (%s); serving on with the last orders", error)
                self._away = True

    def _report(self) -> None:
        member = self._member
        orders = self._coordinator.report(member.id, member.incarnation, self._read_stats(), member.state)
        if orders.known and self._registered == _route(member):
            self._obey(orders)
            return
        self._coordinator.register(member)
        self._registered = _route(member)


def _route(member: Member) -> tuple[str, str]:
    """What the fleet must be told anew when it changes."""
    return member.address, member.head
