"""One user's side of the load: its workload, its connection, the number of its next request."""

from __future__ import annotations

import random
from collections.abc import Callable

from loadtest.client import Client
from loadtest.plan import Plan
from loadtest.scenarios import SCENARIOS
from loadtest.timing import Answer


class Session:
    """Asks what its workload wants next, one request after the other."""

    def __init__(self, plan: Plan, index: int, api_key: str | None, elapsed: Callable[[], float]) -> None:
        self.index = index
        self.number = 0
        self._client = Client(plan.host, api_key, plan.timeout_s)
        # A string seeds alike in every process; its hash would not.
        chance = random.Random(f"{plan.knobs.seed}/{index}")
        self._workload = SCENARIOS[plan.scenario].make(plan.knobs, chance, elapsed)
        self._next = next(self._workload)

    @property
    def label(self) -> str:
        """The kind of the next request."""
        return self._next.label

    def ask(self, started: float | None = None) -> Answer:
        """Makes the next request."""
        answer = self._client.ask(self._next, self.index, self.number, started)
        self.number += 1
        self._next = self._workload.send(answer)
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
