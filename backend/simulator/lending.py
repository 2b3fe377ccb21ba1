"""The launcher's part in a simulated fleet's loans: places are lent and given back after the time that takes.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from backend.coordinator.roles import Roles
from backend.fleet import Loan

ASK_S = 0.25


@dataclass
class SimulatedLender:
    """`begin` starts a drafter in a verifier's place and returns its name, `end` ends it; `at(s, f)` calls f at second s."""

    roles: Roles
    start_s: float
    """Seconds until a lent drafter drafts."""
    back_s: float
    """Seconds until a verifier serves again."""
    at: Callable[[float, Callable[[], None]], None]
    begin: Callable[[str], str]
    end: Callable[[str], None]
    loans: dict[str, Loan] = field(default_factory=dict)

    def ask(self, now: float) -> bool:
        """Tells the coordinator, and does as it wants; True when that changes who serves."""
        wanted = set(self.roles.lending(list(self.loans.values()), now))
        new, back = wanted - self.loans.keys(), {v for v, loan in self.loans.items() if loan.phase != "returning"} - wanted
        for verifier in sorted(new):
            self.loans[verifier] = Loan(verifier, phase="starting")
            self.at(now + self.start_s, partial(self._begin, verifier, self.loans[verifier]))
        for verifier in sorted(back):
            if self.loans[verifier].drafter_id:
                self.end(self.loans[verifier].drafter_id)
            self.loans[verifier] = msgspec.structs.replace(self.loans[verifier], phase="returning")
            self.at(now + self.back_s, partial(self._over, verifier))
        return bool(new or back)

    def _begin(self, verifier: str, loan: Loan) -> None:
        if self.loans.get(verifier) is loan:
            self.loans[verifier] = msgspec.structs.replace(loan, drafter_id=self.begin(verifier), phase="lent", method="sleep")

    def _over(self, verifier: str) -> None:
        del self.loans[verifier]
