"""Keeps a member in the fleet: registers it, reports a few times a second, and passes on the coordinator's orders.

Runs as one thread of the member's process.  While the coordinator is away, the member serves on with its last orders.  It
registers again when the coordinator is back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from backend.coordinator.messages import CoordinatorUnavailable
from backend.fleet import DrafterStats, Member, MemberState, Orders, VerifierStats

if TYPE_CHECKING:
    from backend.coordinator.actor import CoordinatorHandle

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.25


class Membership:
    """One member's registration and reports.

    `read_stats` and `obey` are called on this object's thread; `obey` gets the orders that answer each report.
    """

    def __init__(
        self,
        coordinator: CoordinatorHandle,
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
        self._changing = threading.Lock()
        """Held while `_member` is read, changed and written: threads of the member's own and the reports' do so."""
        self._registered = member.route
        self._away = False
        self._retiring = False
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def join_fleet(self) -> None:
        """Starts to report; the first report registers the member."""
        self._thread.start()

    def leave_fleet(self) -> None:
        """Stops reporting and deregisters."""
        self._leave.set()
        self._thread.join(timeout=5)
        try:
            self._coordinator.deregister(self._member.id, self._member.incarnation)
        except CoordinatorUnavailable:
            logger.info("left without a goodbye: the coordinator is away")

    def become(self, state: MemberState, address: str = "") -> None:
        """Changes the state, and the address if one is given, that the next report carries."""
        with self._changing:
            self._change(state=state, address=address or self._member.address)

    def take_head(self, head: str, takes_features: bool) -> None:
        """This drafter now has another head or draft model; the next report registers it again."""
        with self._changing:
            self._change(head=head, takes_features=takes_features, swaps=self._member.swaps + 1)

    def drain(self, ordered: bool) -> None:
        """Switches between `ready` and `draining`, as ordered.  A member that is still starting stays `starting`."""
        with self._changing:
            if self._member.state in ("ready", "draining"):
                self._change(state="draining" if ordered or self._retiring else "ready")

    def retire(self) -> None:
        """Drains for good, regardless of later orders, because this process is about to end."""
        self._retiring = True
        self.drain(ordered=True)

    def _change(self, **fields: Any) -> None:
        self._member = msgspec.structs.replace(self._member, **fields)

    def _run(self) -> None:
        while not self._leave.is_set():
            try:
                self._report()
                self._away = False
            except CoordinatorUnavailable as error:
                if not self._away:
                    logger.warning("coordinator is away (%s); serving on with the last orders", error)
                self._away = True
            self._leave.wait(self._interval_s)

    def _report(self) -> None:
        member = self._member
        # A new state that was reported before a new address would be shown with the earlier one, and peers would connect there.
        if self._registered == member.route:
            orders = self._coordinator.report(member.id, member.incarnation, self._read_stats(), member.state)
            if orders.known:
                self._obey(orders)
                return
        self._coordinator.register(member)
        self._registered = member.route
