"""Which fault comes when (repeatable by seed), and how each is done.  Only processes of the campaign's own fleet are hit."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.support.fleet_process import ServedFleet
from tests.support.process_tree import actors

HEARTBEATS_S = 7.0
"""Long enough for connections to be given up."""
BACK_S = 90.0
"""How long what was hit may take to serve again."""
FULL = {
    "drafter killed": 6,
    "drafter stopped": 5,
    "verifier killed": 4,
    "verifier stopped": 4,
    "verifier paused": 3,
    "both verifiers killed": 1,
    "coordinator killed": 2,
    "coordinator stopped": 2,
    "gateway stopped": 3,
    "clients gone": 3,
}
QUICK = {kind: 1 for kind in FULL if kind not in ("verifier paused", "both verifiers killed", "coordinator stopped")}
STOP_S = {
    "drafter stopped": 3.0,
    "verifier stopped": HEARTBEATS_S,
    "verifier paused": 1.0,
    "coordinator stopped": 4.0,
    "gateway stopped": HEARTBEATS_S,
}


@dataclass(frozen=True)
class Planned:
    """One fault of the schedule."""

    kind: str
    after_s: float
    """Seconds after the one before, at least: the part it hits must be whole again."""
    which: int
    """Which verifier or drafter."""


def schedule(counts: dict[str, int], seed: int) -> list[Planned]:
    """The same for the same seed."""
    rng = random.Random(seed)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return [Planned(kind, rng.uniform(1.0, 3.0), rng.randrange(2)) for kind in kinds]


class Saboteur:
    """Does one fault after the other.  `abandon(n)` makes up to n clients leave."""

    def __init__(self, fleet: ServedFleet, abandon: Callable[[int], None]) -> None:
        self.done: list[str] = []
        """Kinds of faults so far."""
        self._fleet = fleet
        self._abandon = abandon
        self._watches: list[asyncio.Task[list[dict[str, Any]]]] = []

    async def run(self, planned: list[Planned]) -> None:
        """Until all faults are done and what was hit is back."""
        for one in planned:
            await asyncio.sleep(one.after_s)
            await self._one(one)
            self.done.append(one.kind)
        await asyncio.gather(*self._watches)

    async def _one(self, planned: Planned) -> None:
        kind, what, pids = planned.kind, "all", [self._fleet.process.pid]
        if kind == "clients gone":
            self._abandon(3)
            return
        if kind.startswith("coordinator"):
            while not (pids := actors(self._fleet.process.pid)["CoordinatorActor"]):
                await asyncio.sleep(0.1)
        elif kind != "gateway stopped":
            what = "drafters" if kind.startswith("drafter") else "verifiers"
            members = await self._whole(what)
            pids = [each["pid"] for each in (members if kind.startswith("both") else [members[planned.which]])]
        stops = kind in STOP_S
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if stops:
            try:
                await asyncio.sleep(STOP_S[kind])
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        self._watches.append(asyncio.create_task(self._whole(what, () if stops else set(pids))))

    async def _whole(self, what: str, without: Collection[int] = ()) -> list[dict[str, Any]]:
        """Waits until all verifiers, drafters or both serve, by processes other than `without`; returns them."""
        deadline = time.monotonic() + BACK_S
        seen: list[Any] = []
        while True:
            try:
                state = await asyncio.to_thread(self._fleet.fleet)
            except Exception:
                # The gateway may be the one that was stopped.
                state = {"verifiers": [], "drafters": [], "assignments": []}
            parts = {"verifiers": state["verifiers"], "drafters": state["drafters"]}
            wanted = list(parts) if what == "all" else [what]
            reports = [one["last_report_s"] for each in parts.values() for one in each]
            # While the coordinator is away the gateway shows its last answer.
            fresh, seen = bool(seen) and reports != seen, reports
            if fresh and all(len(parts[each]) == 2 and all(_serves(one, without) for one in parts[each]) for each in wanted):
                return [one for each in wanted for one in sorted(parts[each], key=lambda one: one["id"])]
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {what} were not all back within {BACK_S:.0f} s")
            await asyncio.sleep(0.6)


def _serves(member: dict[str, Any], without: Collection[int]) -> bool:
    return member["state"] == "ready" and member["pid"] not in without and member.get("connected", True)
