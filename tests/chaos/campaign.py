"""Load and faults together against `outrider serve`, and what must be true afterwards."""

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from backend.lab.bench.hardware import commit
from tests.chaos.faults import FULL, QUICK, Saboteur, schedule
from tests.chaos.workload import Case, Outcome, ask, cases, failed, what_is_wrong
from tests.support.fleet_process import ServedFleet
from tests.support.process_tree import actors, descendants, name_of

SETTLE_S = 150.0
"""How long counters may take to fall to zero after the last request."""
SOCKETS_SLACK = 8
REQUESTS, QUICK_REQUESTS = 300, 40
"""Under faults, at least."""
CONCURRENCY = 8
TOKENS = 240
"""Of the longest requests."""
SHARED_MEMORY = "/dev/shm"


@dataclass
class Result:
    """What the campaign found."""

    mode: str
    seed: int
    faults: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, holds: bool, otherwise: str) -> None:
        """Notes a problem."""
        if not holds:
            self.problems.append(otherwise)


class Load:
    """Keeps `CONCURRENCY` requests going, at least `requests` of them and for as long as `enough` is not set."""

    def __init__(self, url: str, kinds: list[Case], requests: int, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self.enough = asyncio.Event()
        self._url = url
        self._requests = requests
        rng = random.Random(seed)
        shuffled = [case for _ in range(1 + requests // len(kinds)) for case in rng.sample(kinds, len(kinds))]
        self._next = itertools.cycle(shuffled)
        self._running: dict[asyncio.Task[None], Outcome] = {}

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CONCURRENCY)
        async with httpx.AsyncClient(base_url=self._url, timeout=180, limits=limits) as http:
            await asyncio.gather(*(self._client(http) for _ in range(CONCURRENCY)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while len(self.outcomes) < self._requests or not self.enough.is_set():
            outcome = Outcome(next(self._next))
            self.outcomes.append(outcome)
            task = asyncio.create_task(ask(http, outcome))
            self._running[task] = outcome
            await asyncio.gather(task, return_exceptions=True)
            del self._running[task]
            if outcome.nowhere_to_go:
                # What the answer's Retry-After says.
                await asyncio.sleep(1)

    def abandon(self, count: int) -> None:
        """Up to `count` clients close their connections in the middle of an answer."""
        leaving = [(task, outcome) for task, outcome in self._running.items() if outcome.received]
        for task, outcome in leaving[:count]:
            outcome.abandoned = True
            task.cancel()


async def references(url: str, kinds: list[Case]) -> dict[int, Outcome]:
    """What each exact case says in an undisturbed run, by the case's place in the list."""
    found: dict[int, Outcome] = {}
    async with httpx.AsyncClient(base_url=url, timeout=180) as http:
        queue = iter([(i, case) for i, case in enumerate(kinds) if case.exact])

        async def client() -> None:
            for i, case in queue:
                found[i] = Outcome(case)
                await ask(http, found[i])

        await asyncio.gather(*(client() for _ in range(4)))
    return found


async def disturbed(options: argparse.Namespace) -> Result:
    """The whole campaign; leaves nothing behind."""
    began = time.monotonic()
    result = Result(options.mode, options.seed)
    shared, sockets = set(os.listdir(SHARED_MEMORY)), unix_sockets()
    fleet = await asyncio.to_thread(
        ServedFleet,
        *("--mode", options.mode, "--verifiers=2", "--drafters=2", "--gateway-queue-wait-s=90"),
        '--verifier-engine-args={"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": true}}',
        # The campaign kills verifiers under innocent requests.
        constants={"gateway.fleet.core.POISON_AFTER": 50},
    )
    try:
        await _under_load(fleet, options, result)
        await _settled(fleet, result)
    finally:
        below = descendants(fleet.process.pid)
        status = await asyncio.to_thread(fleet.stop)
    result.check(status == 0, f"the fleet ended with status {status}")
    await _gone(below, shared, sockets, result)
    result.seconds = time.monotonic() - began
    return result


async def _under_load(fleet: ServedFleet, options: argparse.Namespace, result: Result) -> None:
    kinds = cases(TOKENS)
    known = await references(fleet.url, kinds)
    for i, reference in known.items():
        result.check(not reference.errors and reference.done, f"undisturbed: {kinds[i].name} failed: {reference.errors}")
    # Twice: what a first request opens for good is not a leak.
    await references(fleet.url, kinds[:2])
    result.metrics["sockets before"] = open_sockets(fleet)
    load = Load(fleet.url, kinds, QUICK_REQUESTS if options.quick else REQUESTS, options.seed)
    saboteur = Saboteur(fleet, load.abandon)
    result.faults, result.outcomes = saboteur.done, load.outcomes
    running = asyncio.create_task(load.run())
    try:
        await saboteur.run(schedule(QUICK if options.quick else FULL, options.seed))
    except TimeoutError as error:
        result.problems.append(str(error))
    finally:
        load.enough.set()
        await running
    places = {id(case): i for i, case in enumerate(kinds)}
    _judge(result, {id(kinds[i]): reference for i, reference in known.items()}, places)


def _judge(result: Result, known: dict[int, Outcome], places: dict[int, int]) -> None:
    outcomes = result.outcomes
    for each in failed(outcomes):
        result.problems.append(f"failed: {each.case.name}: {each.errors}")
    wrong = Counter[str]()
    for each in outcomes:
        if each.errors or each.abandoned:
            continue
        reason = what_is_wrong(each, known.get(id(each.case)))
        if reason is not None:
            wrong[f"wrong: {each.case.name} ({places[id(each.case)]}): {reason}"] += 1
    result.problems += [f"{text} ({count} times)" for text, count in wrong.items()]


def open_sockets(fleet: ServedFleet) -> int:
    """Sockets that the gateway holds open."""
    return len(psutil.Process(fleet.process.pid).net_connections("all"))


def unix_sockets() -> set[str]:
    """Paths that unix sockets of this machine are bound to."""
    return {str(each.laddr) for each in psutil.net_connections("unix")}


async def _settled(fleet: ServedFleet, result: Result) -> None:
    """Nothing is left of any request, anywhere."""
    gauges = {
        "outrider_requests_in_flight": 0,
        "outrider_sequences_without_verifier": 0,
        "outrider_verifier_running": 0,
        "outrider_verifier_waiting": 0,
        "outrider_verifiers_connected": 2,
    }

    def left() -> dict[str, Any]:
        state = fleet.fleet()
        values: dict[str, Any] = {name: fleet.metric(name) - wanted for name, wanted in gauges.items()}
        values["drafters' sequences"] = sum(drafter["sequences"] for drafter in state["drafters"])
        return {name: value for name, value in values.items() if value}

    deadline = time.monotonic() + SETTLE_S
    remaining = await asyncio.to_thread(left)
    while remaining and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        remaining = await asyncio.to_thread(left)
    result.check(not remaining, f"left over after {SETTLE_S:.0f} s: {remaining}")
    result.metrics["sockets after"] = open_sockets(fleet)
    grown = result.metrics["sockets after"] - result.metrics["sockets before"]
    result.check(grown <= SOCKETS_SLACK, f"the gateway holds {grown:g} sockets more than before")
    running = {actor: len(pids) for actor, pids in actors(fleet.process.pid).items()}
    result.check(running == {"CoordinatorActor": 1, "Drafter": 2, "Verifier": 2}, f"actors are missing or left over: {running}")
    for name in (
        "outrider_failovers_total",
        "outrider_migrations_total",
        "outrider_poisoned_total",
        "outrider_recovery_seconds_count",
        "outrider_recovery_seconds_sum",
        "outrider_generated_tokens_total",
    ):
        result.metrics[name] = await asyncio.to_thread(fleet.metric, name)
    result.check(result.metrics["outrider_poisoned_total"] == 0, "requests were refused as poison")


async def _gone(below: set[int], shared: set[str], sockets: set[str], result: Result) -> None:
    """The fleet has stopped: no process, socket or shared memory of it remains."""
    deadline = time.monotonic() + 20
    while any(name_of(pid) for pid in below) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    remaining = [name_of(pid) for pid in below if name_of(pid)]
    result.check(not remaining, f"processes remain: {remaining}")
    kept = sorted(set(os.listdir(SHARED_MEMORY)) - shared)
    result.check(not kept, f"shared memory remains: {kept}")
    ours = sorted(path for path in unix_sockets() - sockets if "outrider" in path)
    result.check(not ours, f"sockets remain: {ours}")


def report(result: Result, command: str) -> str:
    """What was found, as JSON."""
    outcomes = result.outcomes
    document = {
        "command": command,
        "commit": commit(),
        "mode": result.mode,
        "seed": result.seed,
        "seconds": round(result.seconds, 1),
        "faults": dict(sorted(Counter(result.faults).items())),
        "requests": len(outcomes),
        "requests by kind": dict(sorted(Counter(each.case.name for each in outcomes).items())),
        "left by their clients": sum(each.abandoned for each in outcomes),
        "nowhere to go": sum(each.nowhere_to_go for each in outcomes),
        "metrics": result.metrics,
        "problems": result.problems,
    }
    return json.dumps(document, indent=1) + "\n"
