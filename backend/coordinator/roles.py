"""Elastic roles: carries `Lending`'s decisions out as far as the coordinator can, and tells the launcher the rest.  Pure.

The launcher asks several times a second which verifiers' places are to be lent, and with the question tells how each loan
stands (`lending`).  So a coordinator that Ray has restarted takes over the loans it is told of.  Runs in the coordinator actor,
one call at a time.

    wanted       decided here: the verifier takes nothing new from this moment on, and its drafters go elsewhere
    returning    decided here, or begun by the launcher when something died: the lent drafter drafts for nobody from then on
    neither      the verifier serves as it did before
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from backend.config.settings import ElasticSettings
from backend.coordinator.assignment import DrafterSpeed
from backend.coordinator.lending import Lend, Lending, OnLoan, Return, Scene, Worth
from backend.coordinator.policy import Coordinator
from backend.coordinator.water_filling import WaterFilling
from backend.fleet import FleetSnapshot, Loan


class Roles:
    """The loans of one fleet.  `busy_with()` names the members that an operation is about."""

    def __init__(
        self, policy: Coordinator, settings: ElasticSettings, busy_with: Callable[[], Collection[str]] = tuple
    ) -> None:
        self._policy = policy
        self._settings = settings
        self._busy_with = busy_with
        self._rule = WaterFilling()
        self._lending = Lending(settings)
        self._wanted: dict[str, Loan] = {}
        """By verifier, as last told by the launcher; before that as decided."""
        self._returning: dict[str, Loan] = {}
        self._wasted: set[str] = set()
        """Those of them that brought nothing."""
        self._begun: set[str] = set()
        """Loans that the launcher has told of."""
        self._decided_at: dict[str, float] = {}
        self._lent_at: dict[str, float] = {}

    @property
    def loans(self) -> list[Loan]:
        """All there are, by verifier."""
        return [loan for _, loan in sorted({**self._wanted, **self._returning}.items())]

    @property
    def drafters(self) -> dict[str, str]:
        """Lent drafters, and in whose place each stands."""
        return {loan.drafter_id: loan.verifier_id for loan in self.loans if loan.drafter_id}

    def shown(self, snapshot: FleetSnapshot, now: float) -> FleetSnapshot:
        """The fleet with its loans."""
        loans = [
            msgspec.structs.replace(loan, since_s=max(now - self._decided_at.get(loan.verifier_id, now), 0.0))
            for loan in self.loans
        ]
        return msgspec.structs.replace(snapshot, loans=loans)

    def lending(self, told: Sequence[Loan], now: float) -> list[str]:
        """What the launcher has lent or is about to; returns the verifiers whose places are to be lent from now on."""
        snapshot = self._policy.snapshot(now)
        self._hear(told, now)
        self._observe(snapshot, now)
        if self._settings.enabled:
            self._decide(snapshot, now)
        self._apply(now)
        return sorted(self._wanted)

    # Details.

    def _hear(self, told: Sequence[Loan], now: float) -> None:
        loans = {loan.verifier_id: loan for loan in told}
        for verifier, loan in loans.items():
            self._begun.add(verifier)
            self._decided_at.setdefault(verifier, now)
            if loan.phase == "lent":
                self._lent_at.setdefault(verifier, now)
            if loan.phase in ("returning", "failed"):
                self._wanted.pop(verifier, None)
                if loan.phase == "failed" and verifier not in self._wasted:
                    self._wasted.add(verifier)
                    self._policy.counters.lends_failed += 1
                self._returning[verifier] = self._noted(loan, self._returning)
            elif verifier in self._returning:
                self._returning[verifier] = msgspec.structs.replace(self._noted(loan, self._returning), phase="returning")
            else:
                # One not known was lent by this actor's predecessor.
                self._wanted[verifier] = self._noted(loan, self._wanted)
        for verifier in self._begun - loans.keys():
            self._over(verifier, now)
        for verifier in [each for each in self._returning if each not in self._begun]:
            self._over(verifier, now)

    @staticmethod
    def _noted(loan: Loan, known: Mapping[str, Loan]) -> Loan:
        """With what was said at the decision, unless the launcher has something to say."""
        before = known.get(loan.verifier_id)
        return msgspec.structs.replace(loan, note=loan.note or (before.note if before is not None else ""))

    def _over(self, verifier: str, now: float) -> None:
        """The verifier serves again."""
        self._lending.ended(verifier, verifier in self._wasted, now)
        self._policy.counters.returns += 1
        for kept in (self._wanted, self._returning, self._decided_at, self._lent_at):
            kept.pop(verifier, None)
        self._begun.discard(verifier)
        self._wasted.discard(verifier)

    def _observe(self, snapshot: FleetSnapshot, now: float) -> None:
        for view in snapshot.members:
            stats = view.verifier
            if view.member.kind != "verifier":
                continue
            if stats is None or view.member.state == "lost":
                self._lending.forget(view.member.id)
            else:
                mark = stats.started_at + stats.busy_s + sum(stats.idle_s.values()) + stats.steps
                self._lending.observe(view.member.id, mark, stats.running, stats.waiting, stats.plain_step_s, now)

    def _decide(self, snapshot: FleetSnapshot, now: float) -> None:
        ready = {view.member.id: view.member.kind for view in snapshot.members if view.member.state == "ready"}
        drained = {view.member.id for view in snapshot.members if view.drain is not None}
        lent = {
            key: OnLoan(loan.drafter_id, loan.method, self._lent_at.get(key) if loan.drafter_id in ready else None)
            for key, loan in self._wanted.items()
        }
        serving = [key for key, kind in ready.items() if kind == "verifier"]
        blocked = {*drained, *self._busy_with()}
        for action in self._lending.decide(Scene(now, serving, lent, tuple(self._returning), blocked, self._worth(now))):
            if isinstance(action, Lend):
                self._policy.counters.lends += 1
                self._wanted[action.verifier] = Loan(action.verifier, note=action.note)
                self._decided_at[action.verifier] = now
            else:
                self._take_back(action)

    def _take_back(self, action: Return) -> None:
        loan = self._wanted.pop(action.verifier)
        self._returning[action.verifier] = msgspec.structs.replace(loan, phase="returning", note=action.note)
        if action.wasted:
            self._wasted.add(action.verifier)

    def _worth(self, now: float) -> Worth:
        known = self._policy.situation(now)

        def worth(without_verifiers: Collection[str], more: int, without_drafters: Collection[str]) -> float:
            drafters = [each for each in known.drafters if each.id not in without_drafters]
            # Names that sort behind all others; nothing measured, so as fast as the others are on average.
            drafters += [DrafterSpeed(f"~{i}") for i in range(more)]
            verifiers = [each for each in known.verifiers if each.id not in without_verifiers]
            return self._rule.decide(replace(known, verifiers=verifiers, drafters=drafters)).after

        return worth

    def _apply(self, now: float) -> None:
        """Who is out of service; a verifier that only idles serves from the decision to return on."""
        away = {*self._wanted, *(key for key, loan in self._returning.items() if loan.method != "aside")}
        self._policy.withdraw({*away, *(loan.drafter_id for loan in self._returning.values() if loan.drafter_id)}, now)
