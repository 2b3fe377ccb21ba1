"""Which fault comes when (repeatable by seed), and how each is done.  Only processes of the campaign's own fleet are hit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from tests.support.fleet_process import ServedFleet
from tests.support.process_tree import actors

HEARTBEATS_S = 7.0
"""Long enough for connections to be given up."""
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


@dataclass
class Done:
    """One fault as it happened."""

    kind: str
    at: float
    """Monotonic seconds."""
    back_s: float | None = None
    """Until the part was in service again."""
    silences: list[float] = field(default_factory=list)
    """The time without text of every stream that was running."""


def schedule(counts: dict[str, int], seed: int) -> list[Planned]:
    """The same for the same seed."""
    rng = random.Random(seed)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return [Planned(kind, rng.uniform(1.0, 3.0), rng.randrange(2)) for kind in kinds]


class Saboteur:
    """Does one fault after the other.  `abandon(n)` makes up to n clients leave."""

    def __init__(self, fleet: ServedFleet, abandon: Callable[[int], int]) -> None:
        self.done: list[Done] = []
        self._fleet = fleet
        self._abandon = abandon
        self._watches: set[asyncio.Task[None]] = set()

    async def run(self, planned: list[Planned]) -> None:
        """Until all faults are done and what was hit is back."""
        for one in planned:
            await asyncio.sleep(one.after_s)
            await self._one(one)
        await asyncio.gather(*self._watches)

    async def _one(self, planned: Planned) -> None:
        kind = planned.kind
        if kind == "clients gone":
            self.done.append(Done(kind, time.monotonic()))
            self._abandon(3)
        elif kind == "gateway stopped":
            await self._stop(kind, [self._fleet.process.pid], None)
        elif kind.startswith("coordinator"):
            await self._coordinator(kind)
        else:
            what = "drafters" if kind.startswith("drafter") else "verifiers"
            members = await self._whole(what)
            hit = members if kind.startswith("both") else [members[planned.which]]
            if kind in STOP_S:
                await self._stop(kind, [each["pid"] for each in hit], what)
            else:
                self._kill(kind, [each["pid"] for each in hit], what)

    async def _coordinator(self, kind: str) -> None:
        while not (pids := actors(self._fleet.process.pid)["CoordinatorActor"]):
            await asyncio.sleep(0.1)
        if kind in STOP_S:
            await self._stop(kind, pids, "all")
        else:
            self._kill(kind, pids, "all")

    def _kill(self, kind: str, pids: list[int], what: str) -> None:
        done = Done(kind, time.monotonic())
        self.done.append(done)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._watch(done, what, set(pids))

    async def _stop(self, kind: str, pids: list[int], what: str | None) -> None:
        done = Done(kind, time.monotonic())
        self.done.append(done)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOP_S[kind])
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self._watch(done, what or "all", set())

    def _watch(self, done: Done, what: str, without: set[int]) -> None:
        async def until_back() -> None:
            await self._whole(what, without)
            done.back_s = time.monotonic() - done.at

        task = asyncio.create_task(until_back())
        self._watches.add(task)
        task.add_done_callback(lambda task: None)

    async def _whole(self, what: str, without: Collection[int] = (), limit_s: float = 90.0) -> list[dict[str, Any]]:
        """Waits until all verifiers, drafters or both serve, by processes other than `without`; returns them."""
        deadline = time.monotonic() + limit_s
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
                raise TimeoutError(f"the {what} were not all back within {limit_s:.0f} s")
            await asyncio.sleep(0.6)


def _serves(member: dict[str, Any], without: Collection[int]) -> bool:
    return member["state"] == "ready" and member["pid"] not in without and member.get("connected", True)
