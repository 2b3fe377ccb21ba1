"""Lends verifiers' places to drafters and gives them back, as the coordinator decides.  Threads of the launcher's process.

One thread tells the coordinator several times a second how the loans stand, and hears which places are wanted; each loan has a
thread of its own, whose code reads as what happens to the place:

    empty       every gateway knows that the verifier takes nothing new, and it has nothing left
    make room   it sleeps (on a CPU: idles), or its process ends
    start       a drafter on its cores or GPUs
    wait        until the place is wanted back, or one of the two dies
    give back   the drafter is released, then ended; the verifier wakes up, or is started again until it serves

Whatever fails on the way there, the place is given back: the fleet never has fewer verifiers for having tried.  Operations on
the same members wait meanwhile (`operator.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from backend.coordinator import CoordinatorUnavailable
from backend.fleet import FleetSnapshot, Loan, LoanMethod, LoanPhase, Member
from backend.launch.emptying import Emptying
from backend.launch.places import lent_drafter
from backend.launch.plan import PlanError
from backend.launch.processes import LaunchError, cause, stop

if TYPE_CHECKING:
    from backend.launch.fleet import Fleet

logger = logging.getLogger(__name__)

POLL_S = 0.2
JOIN_S = 5.0
ROOM_TIMEOUT_S = 150.0
"""For a verifier to sleep or to wake up; large weights take a while."""
START_TIMEOUT_S = 600.0
RELEASE_S = 3.0
"""Verifiers let go of a drafter with their next report; one that does not report must not keep a place."""
AWAY_S = 30.0
"""A lent drafter that died and that Ray has not brought back within this time is given up."""
RETRY_S = 30.0
"""Longest pause before a verifier that does not come back is started once more."""


class _Stopped(Exception):
    """The fleet is ending."""


class _WantedBack(Exception):
    """The coordinator wants the verifier to serve again."""


@dataclass
class _Loan:
    """One loan on its way; its own thread changes it, others read."""

    verifier: str
    phase: LoanPhase | None = "emptying"
    """None: over, the verifier serves again."""
    drafter: str = ""
    method: LoanMethod = ""
    note: str = ""
    incarnation: str = ""
    """The verifier's, when it was lent."""
    began: float = field(default_factory=time.monotonic)

    def told(self) -> Loan:
        """As the coordinator is told."""
        return Loan(self.verifier, self.drafter, self.phase or "returning", self.method, note=self.note)


class Lender:
    """Works for one `Fleet` until it is stopped."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._say = say
        self._loans: dict[str, _Loan] = {}
        self._wanted: frozenset[str] = frozenset()
        self._snapshot: FleetSnapshot | None = None
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="lender", daemon=True)]

    def start(self) -> None:
        """Begins to ask."""
        self._threads[0].start()

    def stop(self) -> None:
        """Leaves every place as it is; whoever stops the fleet ends the drafters too."""
        self._stopping.set()
        with self._news:
            self._news.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self._ask()
            except CoordinatorUnavailable as error:
                # Loans go on as they are: its successor is told of them.
                logger.debug("not told what to lend: %s", error)

    def _ask(self) -> None:
        ended = [loan for loan in self._loans.values() if loan.phase in (None, "failed")]
        told = [loan.told() for loan in self._loans.values() if loan.phase is not None]
        wanted = frozenset(self._fleet.coordinator.lending(told))
        snapshot = self._fleet.coordinator.snapshot()
        for loan in ended:
            del self._loans[loan.verifier]
        with self._news:
            self._wanted, self._snapshot = wanted, snapshot
            self._news.notify_all()
        failed = {loan.verifier for loan in ended if loan.phase == "failed"}
        for verifier in sorted(wanted - self._loans.keys() - failed):
            if verifier in self._fleet.members:
                loan = self._loans[verifier] = _Loan(verifier)
                thread = threading.Thread(target=self._lend, args=(loan,), name=f"loan-{verifier}", daemon=True)
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()

    # One loan.

    def _lend(self, loan: _Loan) -> None:
        try:
            failed = self._use(loan)
        except _Stopped:
            return
        except Exception:
            # Whatever it is, the place is given back.
            logger.exception("the loan of %s failed", loan.verifier)
            failed, loan.note = True, "see the launcher's log"
        loan.phase = "returning"
        while True:
            try:
                self._give_back(loan)
                break
            except _Stopped:
                return
            except Exception:
                # A place must not be lost for ever, whatever goes wrong now.
                logger.exception("giving %s its place back failed; trying again", loan.verifier)
            if self._stopping.wait(RETRY_S):
                return
        loan.phase = "failed" if failed else None

    def _use(self, loan: _Loan) -> bool:
        """Everything until the place is to be given back; True when that is because something went wrong."""
        try:
            self._empty(loan)
            self._make_room(loan)
            self._start_drafter(loan)
            loan.phase = "lent"
            self._say(f"{loan.verifier} lends its place to {loan.drafter} ({loan.method}): {self._why(loan)}")
            self._watch(loan)
        except _WantedBack:
            return False
        except (LaunchError, PlanError, ray.exceptions.RayError, ValueError) as error:
            loan.note = cause(error) if isinstance(error, ray.exceptions.RayError) else str(error)
            self._say(f"{loan.verifier} does not lend its place: {loan.note}")
        return True

    def _empty(self, loan: _Loan) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        emptying = Emptying(loan.verifier, snapshot.version)
        while not emptying.is_over(snapshot, time.monotonic()):
            snapshot = self._next(loan)
        member = _member(snapshot, loan.verifier)
        if member is None or member.state != "lent":
            raise LaunchError("it is gone")
        loan.incarnation = member.incarnation

    def _make_room(self, loan: _Loan) -> None:
        loan.phase = "starting"
        method, verifier = self._fleet.settings.elastic.method, self._fleet.members[loan.verifier]
        if method != "swap":
            answer = ray.get(verifier.actor.make_room.remote(), timeout=ROOM_TIMEOUT_S)
            if answer in ("aside", "sleep"):
                loan.method = answer
                return
            if method == "sleep":
                raise LaunchError(answer)
            logger.info("%s is swapped: %s", loan.verifier, answer)
        loan.method = "swap"
        stop([verifier])

    def _start_drafter(self, loan: _Loan) -> None:
        verifier = self._fleet.members[loan.verifier]
        node = devices = ""
        if loan.method != "swap":
            node, devices = ray.get(verifier.actor.place.remote(), timeout=ROOM_TIMEOUT_S)
        plan = lent_drafter(verifier.plan, loan.method == "swap", devices)
        # Named before it starts, so that it is known as lent from its first word on.
        loan.drafter = plan.member_id
        drafter = self._fleet.start(plan, place=_on(node) or self._fleet.place(verifier.plan))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not drafter.ready:
            snapshot = self._next(loan)
            if (failure := drafter.failure()) is not None:
                raise LaunchError(failure)
            if drafter.progress(snapshot) is not None:
                logger.info("%s: %s", drafter.member_id, "ready" if drafter.ready else "loading")
            if drafter.gave_up or time.monotonic() > deadline:
                raise LaunchError(f"{drafter.member_id} does not start")

    def _watch(self, loan: _Loan) -> None:
        """Until the place is wanted back; raises `LaunchError` when the verifier dies, or the drafter and nobody starts it."""
        seen = time.monotonic()
        while True:
            snapshot = self._next(loan)
            drafter, verifier = _member(snapshot, loan.drafter), _member(snapshot, loan.verifier)
            if drafter is not None and drafter.state != "lost":
                seen = time.monotonic()
            elif time.monotonic() - seen > AWAY_S:
                raise LaunchError(f"{loan.drafter} is gone")
            here = verifier is not None and verifier.incarnation == loan.incarnation and verifier.state != "lost"
            if loan.method != "swap" and not here:
                raise LaunchError("it has died while its place was lent")

    # Giving back.

    def _give_back(self, loan: _Loan) -> None:
        drafter = self._fleet.members.get(loan.drafter)
        if drafter is not None:
            self._release(loan)
            stop([drafter])
            self._fleet.members.pop(loan.drafter, None)
        if loan.method in ("sleep", "aside"):
            self._wake(loan)
        if loan.method:
            self._await_verifier(loan)
            seconds = time.monotonic() - loan.began
            self._say(f"{loan.verifier} has its place back after {seconds:.0f} s: {self._why(loan)}")

    def _release(self, loan: _Loan) -> None:
        """Its verifiers have been told to do without it."""
        emptying = Emptying(loan.drafter, 0)
        deadline = time.monotonic() + RELEASE_S
        while time.monotonic() < deadline:
            if emptying.is_over(self._next(None), time.monotonic()):
                return

    def _wake(self, loan: _Loan) -> None:
        verifier = self._fleet.members[loan.verifier]
        try:
            ray.get(verifier.actor.come_back.remote(), timeout=ROOM_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError):
            logger.warning("%s has died while its place was lent", loan.verifier)
        except ray.exceptions.RayError as error:
            # It lives and cannot: it is better off anew, and Ray starts another process for it.
            logger.warning("%s does not come back: %s", loan.verifier, cause(error))
            ray.kill(verifier.actor, no_restart=False)

    def _await_verifier(self, loan: _Loan) -> None:
        """Returns when the verifier serves; starts it as often as that takes, at once where its process was ended."""
        verifier = self._fleet.members[loan.verifier]
        is_down, pause_s = loan.method == "swap", 0.0
        if not is_down:
            # Its first start is long over: what is asked now is whether it can still be called.
            verifier.ready_ref = verifier.actor.__ray_ready__.remote()
        while True:
            if is_down:
                if self._stopping.wait(pause_s):
                    raise _Stopped
                pause_s = min(max(2 * pause_s, 1.0), RETRY_S)
                verifier = self._fleet.start(verifier.plan)
            elif self._serves(loan):
                return
            failure = verifier.failure()
            is_down = failure is not None
            if is_down:
                logger.warning("%s; it is started again in %g s", failure, pause_s)

    def _serves(self, loan: _Loan) -> bool:
        snapshot = self._next(None)
        member = _member(snapshot, loan.verifier)
        if member is None or member.state not in ("ready", "draining", "lent"):
            return False
        started = self._fleet.members[loan.verifier]
        if loan.method == "swap" and member.incarnation == loan.incarnation:
            # What is seen is the process that has ended.
            return False
        started.ready = True
        return True

    # Details.

    def _next(self, loan: _Loan | None) -> FleetSnapshot:
        """The next snapshot.  Raises `_Stopped`, and `_WantedBack` when the place of `loan` is."""
        with self._news:
            last = self._snapshot
            while self._snapshot is last and not self._stopping.is_set():
                self._news.wait(1.0)
            if self._stopping.is_set():
                raise _Stopped
            if loan is not None and loan.verifier not in self._wanted:
                raise _WantedBack
            assert self._snapshot is not None
            return self._snapshot

    def _why(self, loan: _Loan) -> str:
        shown = self._snapshot.loans if self._snapshot is not None else []
        return next((each.note for each in shown if each.verifier_id == loan.verifier), "") or loan.note


def _member(snapshot: FleetSnapshot, member_id: str) -> Member | None:
    return next((view.member for view in snapshot.members if view.member.id == member_id), None)


def _on(node: str) -> Any:
    """Ray's way of saying: on this node and no other; empty: wherever there is room."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False) if node else None
