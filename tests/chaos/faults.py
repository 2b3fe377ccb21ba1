"""The faults and how each is done.  Only processes of the campaign's own fleet are hit."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Collection
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
"""What is not killed, but stopped for a while."""


async def sabotage(
    fleet: ServedFleet, counts: dict[str, int], seed: int, abandon: Callable[[int], None], done: list[str]
) -> None:
    """Does one fault after the other, the same for the same seed, until what was hit is back; notes the kinds in `done`.

    `abandon(n)` makes up to n clients leave.  Raises `TimeoutError`.
    """
    rng, gateway = random.Random(seed), fleet.process.pid
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    watches = []
    for kind in kinds:
        await asyncio.sleep(rng.uniform(1.0, 3.0))
        which, what, pids = rng.randrange(2), "all", [gateway]
        if kind == "clients gone":
            abandon(3)
            pids = []
        elif kind.startswith("coordinator"):
            while not (pids := actors(gateway)["CoordinatorActor"]):
                await asyncio.sleep(0.1)
        elif kind != "gateway stopped":
            # What a fault hits must be whole again.
            what = "drafters" if kind.startswith("drafter") else "verifiers"
            members = await _whole(fleet, what)
            pids = [each["pid"] for each in (members if kind.startswith("both") else [members[which]])]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if kind in STOP_S else signal.SIGKILL)
        if kind in STOP_S:
            try:
                await asyncio.sleep(STOP_S[kind])
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        if pids:
            watches.append(asyncio.create_task(_whole(fleet, what, () if kind in STOP_S else set(pids))))
        done.append(kind)
    await asyncio.gather(*watches)


async def _whole(fleet: ServedFleet, what: str, without: Collection[int] = ()) -> list[dict[str, Any]]:
    """Waits until all verifiers, drafters or both serve, by processes other than `without`; returns them."""
    deadline = time.monotonic() + BACK_S
    seen: list[Any] = []
    while True:
        try:
            state = await asyncio.to_thread(fleet.fleet)
        except Exception:
            # The gateway may be the one that was stopped.
            state = {"verifiers": [], "drafters": []}
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
