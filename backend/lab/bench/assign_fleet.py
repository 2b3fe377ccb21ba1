"""The fleet of `make bench-fleet`: verifiers under closed loops, drafters, and the coordinator between them.  Parent process.

Its main thread is the clients' and the coordinator's; a thread per drafter asks for its counters, because a drafter with
nothing to do answers late and the loops must not wait for it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backend.coordinator.policy import Coordinator
from backend.fleet import DrafterRef, DrafterStats, Member, MemberKind, VerifierStats
from backend.lab.bench.children import ENVIRONMENT, Child, ChildError, close_all
from backend.launch.plan import share_cores
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.resolve import ResolvedModels
from backend.transport import Hub, Wire

REPORT_S = 0.25
POLL_S = 0.01
PING_S = 1.0
PROMPT, TOKENS = 128, 192
NEVER_S = 3600 * 24.0
LAYOUTS = ("as-served", "apart", "floating")


def cores_of(layout: str, verifiers: int, drafters: int, cores: Sequence[int]) -> list[list[int]]:
    """Cores of each verifier, then of each drafter.

    `as-served`: as `outrider serve` binds members of one core each; `apart`: drafters share a half of the machine that
    verifiers do not use; `floating`: everybody may run everywhere.
    """
    if layout == "apart" and len(cores) > 1:
        half = len(cores) // 2
        return [list(cores[:half])] * verifiers + [list(cores[half:])] * drafters
    if layout == "as-served":
        return share_cores(cores, [1] * (verifiers + drafters))
    return [list(cores)] * (verifiers + drafters)


@dataclass(frozen=True)
class Reading:
    """Everybody's counters at one moment.  CPU times are seconds of the whole process."""

    verifiers: dict[str, tuple[VerifierStats, float]]
    """And when they came."""
    drafters: dict[str, DrafterStats]
    cpu_s: dict[str, float]
    at: float


class LoadedVerifier:
    """One verifier under a closed loop."""

    def __init__(self, child: Child, hub: Hub, prompts: itertools.cycle[list[int]]) -> None:
        from backend.engine.client import EngineClient

        self.child = child
        self.in_flight = 0
        self.temperature = 0.0
        self.client = EngineClient(child.wait_ready(), "bench", child.check, hub)
        self.refs: list[DrafterRef] = []
        self.plans: Counter[str] = Counter()
        """How often each plan was found in force."""
        self._prompts = prompts

    def assign(self, refs: Sequence[DrafterRef]) -> bool:
        """Tells it its drafters; True when these are others than before."""
        if [ref.id for ref in refs] == [ref.id for ref in self.refs]:
            return False
        self.refs = list(refs)
        self.child.ask(msgspec.to_builtins(self.refs))
        return True

    def turn(self) -> None:
        """Takes what has come, and fills up; what is too much is aborted."""
        from backend.engine.client import sampling

        client = self.client
        client.receive()
        for request_id in [r for r, answer in client.answers.items() if answer.finish_reason is not None]:
            del client.answers[request_id]
        while len(client.answers) < self.in_flight:
            client.add(next(self._prompts), sampling(TOKENS, self.temperature))
        for request_id in list(client.answers)[self.in_flight :]:
            client.abort(request_id)
            del client.answers[request_id]

    def note_plan(self) -> None:
        """Looks at the plan in force."""
        stats = self.client.stats
        if stats is not None and stats.running:
            self.plans[plan_name(stats)] += 1


def plan_name(stats: VerifierStats) -> str:
    """A plan as a mode and its K."""
    if not stats.plan_k:
        return "plain"
    kind = "ahead" if stats.plan_outcomes else "sync"
    return f"{kind} K={stats.plan_k}"


class _Asked:
    """A drafter's counters, asked for on a thread of its own."""

    def __init__(self, child: Child) -> None:
        self.stats: DrafterStats | None = None
        self._child = child
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ask {child.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.stats = msgspec.convert(self._child.ask("stats"), DrafterStats)
            except ChildError:
                return
            self._stop.wait(REPORT_S)


class BenchFleet:
    """Everything that runs, and the coordinator."""

    def __init__(self, directory: Path, verifiers: int, drafters: int, layout: str) -> None:
        from backend.lab.bench.prompts import Prompts

        self._directory = directory
        self._hub = Hub(Wire())
        self.coordinator = Coordinator(60.0)
        names = [f"v{i}" for i in range(verifiers)] + [f"d{i}" for i in range(drafters)]
        shares = cores_of(layout, verifiers, drafters, sorted(os.sched_getaffinity(0)))
        self.cores = dict(zip(names, shares, strict=True))
        self.children = {name: self._child(name, cores) for name, cores in self.cores.items()}
        addresses = {name: child.wait_ready() for name, child in self.children.items() if name[0] == "d"}
        self.refs = {name: DrafterRef(name, "bench", address, "", 1) for name, address in addresses.items()}
        self.asked = {name: _Asked(self.children[name]) for name in self.refs}
        make = Prompts(str(TARGET_DIR), PROMPT)
        self.verifiers = {
            name: LoadedVerifier(child, self._hub, itertools.cycle([make.make("code", f"{name}/{i}") for i in range(64)]))
            for name, child in self.children.items()
            if name[0] == "v"
        }
        self.changes = 0
        """Times that a verifier was given other drafters."""
        self._next_report = self._next_ping = 0.0
        now = time.monotonic()
        for name, child in self.children.items():
            kind: MemberKind = "verifier" if name in self.verifiers else "drafter"
            pid, cores = child.process.pid, tuple(self.cores[name])
            member = Member(name, kind, "bench", "ipc://bench", "", "here", pid, "demo", "ready", cores=cores)
            self.coordinator.register(member, now)

    def _child(self, name: str, cores: list[int]) -> Child:
        models = ResolvedModels(str(TARGET_DIR), str(DRAFTER_DIR), "eagle", "demo")
        is_drafter = name[0] == "d"
        verifier = {"gateway_lease_s": NEVER_S, "max_model_len": 512}
        job: dict[str, Any] = {
            "role": "drafter" if is_drafter else "verifier",
            "name": name,
            "cores": cores,
            "environment": ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            "address": f"ipc://{self._directory}/{name}",
            "target_dir": models.target_dir,
            "head_dir": models.drafter_dir,
            "paths": msgspec.to_builtins(models),
            "settings": {"cores": 1} if is_drafter else {"mode": "auto", "verifier": verifier},
        }
        return Child(job, self._directory / f"{name}.log")

    def hold(self, pins: Mapping[str, Sequence[str]] | None) -> None:
        """Binds drafters for good, or leaves them to the policy."""
        now = time.monotonic()
        for drafter in self.refs:
            if pins is None:
                self.coordinator.unpin(drafter, now)
            else:
                self.coordinator.pin(drafter, pins[drafter], now)

    def load(self, in_flight: Sequence[int], temperatures: Sequence[float]) -> None:
        """Requests in flight at each verifier from now on."""
        for verifier, number, temperature in zip(self.verifiers.values(), in_flight, temperatures, strict=True):
            verifier.in_flight, verifier.temperature = number, temperature

    def run(self, seconds: float) -> None:
        """Serves for so long; members report and obey."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for verifier in self.verifiers.values():
                verifier.turn()
            if now >= self._next_report:
                self._next_report = now + REPORT_S
                self._report(now)
            if now >= self._next_ping:
                self._next_ping = now + PING_S
                for verifier in self.verifiers.values():
                    verifier.client.ping()
            self._hub.poll(POLL_S)

    def read(self) -> Reading:
        """Fresh counters of everybody; the loops go on meanwhile."""
        asked = time.monotonic()
        while any(verifier.client.stats_at <= asked for verifier in self.verifiers.values()):
            self.run(POLL_S)
        found = {}
        for name, verifier in self.verifiers.items():
            assert verifier.client.stats is not None
            found[name] = verifier.client.stats, verifier.client.stats_at
        drafters = {name: asked.stats for name, asked in self.asked.items() if asked.stats is not None}
        return Reading(found, drafters, self._cpu_s(), time.monotonic())

    def close(self) -> None:
        """Ends every process."""
        for asked in self.asked.values():
            asked.close()
        for verifier in self.verifiers.values():
            verifier.client.close()
        self._hub.close()
        close_all(list(self.children.values()))

    def _report(self, now: float) -> None:
        for name, asked in self.asked.items():
            self.coordinator.report(name, "bench", "ready", now, drafter=asked.stats)
        for name, verifier in self.verifiers.items():
            verifier.note_plan()
            orders = self.coordinator.report(name, "bench", "ready", now, verifier=verifier.client.stats)
            self.changes += verifier.assign([self.refs[ref.id] for ref in orders.drafters])

    def _cpu_s(self) -> dict[str, float]:
        ticks = os.sysconf("SC_CLK_TCK")
        found = {}
        for name, pid in {name: child.process.pid for name, child in self.children.items()}.items() | {("client", os.getpid())}:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[name] = (int(fields[11]) + int(fields[12])) / ticks
        return found
