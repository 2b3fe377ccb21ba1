"""`python -m tests.chaos [--quick] [--seed N] [--output DIR] ...`: status 0 when nothing was lost, wrong or left over."""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from backend.lab.bench.hardware import commit
from tests.chaos.faults import FULL, QUICK, sabotage
from tests.chaos.workload import Case, Outcome, ask, cases, failed, what_is_wrong
from tests.support.fleet_process import ServedFleet, home_of_fleets, wait_for
from tests.support.process_tree import actors, descendants, leftovers, name_of

SETTLE_S = 150.0
"""How long counters may take to fall to zero after the last request."""
SOCKETS_SLACK = 8
REQUESTS, QUICK_REQUESTS = 300, 40
"""Under faults, at least."""
CONCURRENCY = 8
TOKENS = 240
"""Of the longest requests."""
SHARED_MEMORY = "/dev/shm"
AT_REST = {
    "outrider_requests_in_flight": 0,
    "outrider_sequences_without_verifier": 0,
    "outrider_verifier_running": 0,
    "outrider_verifier_waiting": 0,
    "outrider_verifiers_connected": 2,
}
COUNTED = (
    "outrider_failovers_total",
    "outrider_migrations_total",
    "outrider_poisoned_total",
    "outrider_recovery_seconds_count",
    "outrider_recovery_seconds_sum",
    "outrider_generated_tokens_total",
)
Check = Callable[[bool, str], None]
"""Notes a problem unless something holds."""


def main() -> int:
    """Runs what was asked for and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few faults, in a minute or two")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and the order of requests")
    parser.add_argument("--mode", default="auto", help="draft mode (default: auto)")
    parser.add_argument("--output", type=Path, default=Path("chaos-report"), help="directory of chaos.json")
    options = parser.parse_args()
    began, report, problems = time.monotonic(), dict[str, Any](), list[str]()

    def check(holds: bool, otherwise: str) -> None:
        if not holds:
            problems.append(otherwise)

    with home_of_fleets() as home:
        disturbed(options, home, report, check)
    head: dict[str, Any] = {"command": "python -m tests.chaos " + " ".join(sys.argv[1:]), "commit": commit()}
    head |= {"mode": options.mode, "seed": options.seed, "seconds": round(time.monotonic() - began, 1)}
    text = json.dumps(head | report | {"problems": problems}, indent=1) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "chaos.json").write_text(text)
    print(text)
    return 1 if problems else 0


def disturbed(options: argparse.Namespace, home: Path, report: dict[str, Any], check: Check) -> None:
    """The whole campaign; leaves nothing behind."""
    shared = set(os.listdir(SHARED_MEMORY))
    fleet = ServedFleet(
        *("--mode", options.mode, "--verifiers=2", "--drafters=2", "--gateway-queue-wait-s=90"),
        '--verifier-engine-args={"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": true}}',
        # The campaign kills verifiers under innocent requests.
        constants={"gateway.fleet.core.POISON_AFTER": 50},
    )
    try:
        sockets = asyncio.run(under_load(fleet, options, report, check))
        settled(fleet, sockets, report, check)
    finally:
        below = descendants(fleet.process.pid)
        status = fleet.stop()
    check(status == 0, f"the fleet ended with status {status}")
    check(within(20, lambda: not any(map(name_of, below))), f"processes remain: {[*filter(None, map(name_of, below))]}")
    check(not (kept := sorted(set(os.listdir(SHARED_MEMORY)) - shared)), f"shared memory remains: {kept}")
    check(not (ours := leftovers(home)), f"files and sockets remain: {ours}")


class Load:
    """Requests of several clients at a time."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._running: dict[asyncio.Task[None], Outcome] = {}

    async def run(self, url: str, asked: Iterator[Case], clients: int) -> None:
        async def client() -> None:
            for case in asked:
                outcome = Outcome(case)
                self.outcomes.append(outcome)
                task = asyncio.create_task(ask(http, outcome))
                self._running[task] = outcome
                await asyncio.gather(task, return_exceptions=True)
                del self._running[task]
                if outcome.nowhere_to_go:
                    # What the answer's Retry-After says.
                    await asyncio.sleep(1)

        async with httpx.AsyncClient(base_url=url, timeout=180, limits=httpx.Limits(max_connections=clients)) as http:
            await asyncio.gather(*(client() for _ in range(clients)))

    def abandon(self, count: int) -> None:
        """Up to `count` clients close their connections in the middle of an answer."""
        leaving = [(task, outcome) for task, outcome in self._running.items() if outcome.received]
        for task, outcome in leaving[:count]:
            outcome.abandoned = True
            task.cancel()


async def references(url: str, kinds: list[Case]) -> dict[int, Outcome]:
    """What each exact case says in an undisturbed run, by the case's `id`."""
    load = Load()
    await load.run(url, (case for case in kinds if case.exact), 4)
    return {id(each.case): each for each in load.outcomes}


async def under_load(fleet: ServedFleet, options: argparse.Namespace, report: dict[str, Any], check: Check) -> int:
    """Judges every answer.  Returns how many sockets the gateway held before."""
    kinds = cases(TOKENS)
    known = await references(fleet.url, kinds)
    for each in known.values():
        check(not each.errors and each.done, f"undisturbed: {each.case.name} failed: {each.errors}")
    # Twice: what a first request opens for good is not a leak.
    await references(fleet.url, kinds[:2])
    sockets = open_sockets(fleet)
    faults: list[str] = []
    over, load, rng = asyncio.Event(), Load(), random.Random(options.seed)

    def asked() -> Iterator[Case]:
        while True:
            for case in rng.sample(kinds, len(kinds)):
                if over.is_set() and len(load.outcomes) >= (QUICK_REQUESTS if options.quick else REQUESTS):
                    return
                yield case

    running = asyncio.create_task(load.run(fleet.url, asked(), CONCURRENCY))
    try:
        await sabotage(fleet, QUICK if options.quick else FULL, options.seed, load.abandon, faults)
    except TimeoutError as error:
        check(False, str(error))
    finally:
        over.set()
        await running
    for each in failed(load.outcomes):
        check(False, f"failed: {each.case.name}: {each.errors}")
    whole = [each for each in load.outcomes if not each.errors and not each.abandoned]
    found = [(each.case, what_is_wrong(each, known.get(id(each.case)))) for each in whole]
    wrong = Counter(f"wrong: {case.name} ({kinds.index(case)}): {reason}" for case, reason in found if reason)
    for text, count in wrong.items():
        check(False, f"{text} ({count} times)")
    report |= {
        "faults": dict(sorted(Counter(faults).items())),
        "requests": len(load.outcomes),
        "requests by kind": dict(sorted(Counter(each.case.name for each in load.outcomes).items())),
        "left by their clients": sum(each.abandoned for each in load.outcomes),
        "nowhere to go": sum(each.nowhere_to_go for each in load.outcomes),
    }
    return sockets


def open_sockets(fleet: ServedFleet) -> int:
    """Sockets that the gateway holds open."""
    return len(psutil.Process(fleet.process.pid).net_connections("all"))


def settled(fleet: ServedFleet, sockets: int, report: dict[str, Any], check: Check) -> None:
    """Nothing is left of any request, anywhere."""

    def left() -> dict[str, float]:
        values = {name: fleet.metric(name) - wanted for name, wanted in AT_REST.items()}
        values["drafters' sequences"] = sum(drafter["sequences"] for drafter in fleet.fleet()["drafters"])
        return {name: value for name, value in values.items() if value}

    check(within(SETTLE_S, lambda: not left()), f"left over after {SETTLE_S:.0f} s: {left()}")
    grown = open_sockets(fleet) - sockets
    check(grown <= SOCKETS_SLACK, f"the gateway holds {grown} sockets more than before")
    running = {actor: len(pids) for actor, pids in actors(fleet.process.pid).items()}
    check(running == {"CoordinatorActor": 1, "Drafter": 2, "Verifier": 2}, f"actors are missing or left over: {running}")
    counted = {name: fleet.metric(name) for name in COUNTED}
    check(counted["outrider_poisoned_total"] == 0, "requests were refused as poison")
    report["metrics"] = {"sockets before": sockets, "sockets after": sockets + grown, **counted}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in this time."""
    try:
        wait_for(condition, seconds)
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
