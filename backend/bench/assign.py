"""`make bench-fleet`: assignment by goodput against a fixed split, on real engines under skewed load.  Parent process.

    python -m backend.bench.assign [--load 8,1] [--drafters 2] [--rounds 4] [--seconds 12] [--output FILE]

Verifiers and drafters are processes on this machine; the coordinator's policy runs here and is fed with the members' own
reports, four times a second.  Rounds alternate between the two ways of assigning.  Both are measured with the same closed
loops: as many requests in flight per verifier as `--load` says.  All processes share this machine's cores: on a
small machine a drafter that does more takes time from the verifiers, which it would not do on hardware of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backend.bench.children import ENVIRONMENT, Child, close_all
from backend.bench.measure import drafting_between
from backend.config import environment
from backend.config.settings import CoordinatorSettings
from backend.coordinator.policy import Coordinator
from backend.demo import DRAFTER_DIR, TARGET_DIR
from backend.fleet import DrafterRef, DrafterStats, Member, MemberKind, VerifierStats
from backend.models import ResolvedModels

REPORT_S = 0.25
SETTLE_S = 3.0
"""Of each round, before it is measured: the other way of assigning has just been left."""
PROMPT, TOKENS = 128, 192
NEVER_S = 3600 * 24.0


class _Verifier:
    """One verifier under a closed loop."""

    def __init__(self, child: Child, in_flight: int, prompts: itertools.cycle[list[int]]) -> None:
        from backend.verifier.client import EngineClient, sampling

        self.child = child
        self.in_flight = in_flight
        self.client = EngineClient(child.wait_ready(), "bench", child.check)
        self.refs: list[DrafterRef] = []
        self._prompts = prompts
        self._sampling = sampling(TOKENS, 0.0)

    def assign(self, refs: Sequence[DrafterRef]) -> bool:
        """Tells it its drafters; True when these are others than before."""
        if [ref.id for ref in refs] == [ref.id for ref in self.refs]:
            return False
        self.refs = list(refs)
        self.child.ask(msgspec.to_builtins(self.refs))
        return True

    def turn(self) -> None:
        """Takes what has come, and fills up."""
        client = self.client
        client.receive()
        for request_id in [r for r, answer in client.answers.items() if answer.finish_reason is not None]:
            del client.answers[request_id]
        while len(client.answers) < self.in_flight:
            client.add(next(self._prompts), self._sampling)


class _Fleet:
    """Everything that runs, and the coordinator."""

    def __init__(self, directory: Path, loads: Sequence[int], drafters: int, settings: CoordinatorSettings) -> None:
        from backend.bench.prompts import Prompts

        make = Prompts(str(TARGET_DIR), PROMPT)
        self.coordinator = Coordinator(60.0, settings=settings)
        self.children = [self._child(directory, "drafter", f"d{i}") for i in range(drafters)]
        self.drafters = {child.name: child for child in self.children}
        verifiers = [self._child(directory, "verifier", f"v{i}") for i in range(len(loads))]
        self.children += verifiers
        self.refs = {name: DrafterRef(name, "bench", child.wait_ready(), "", 1) for name, child in self.drafters.items()}
        self.verifiers = {
            child.name: _Verifier(child, load, itertools.cycle([make.make("code", f"{child.name}/{i}") for i in range(64)]))
            for child, load in zip(verifiers, loads, strict=True)
        }
        self.changes = 0
        now = time.monotonic()
        for name in (*self.verifiers, *self.drafters):
            kind: MemberKind = "verifier" if name in self.verifiers else "drafter"
            self.coordinator.register(Member(name, kind, "bench", "ipc://bench", "", "here", 0, "demo", "ready"), now)

    def _child(self, directory: Path, role: str, name: str) -> Child:
        models = ResolvedModels(str(TARGET_DIR), str(DRAFTER_DIR), "eagle", "demo")
        verifier = {"gateway_lease_s": NEVER_S, "max_model_len": 512}
        job: dict[str, Any] = {
            "role": role,
            "name": name,
            "cores": sorted(os.sched_getaffinity(0)),
            "environment": ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            "address": f"ipc://{directory}/{name}",
            "target_dir": models.target_dir,
            "head_dir": models.drafter_dir,
            "paths": msgspec.to_builtins(models),
            "settings": {"cores": 1} if role == "drafter" else {"mode": "auto", "verifier": verifier},
        }
        return Child(job, directory / f"{name}.log")

    def split(self) -> None:
        """The fixed assignment: drafters dealt out one by one, whatever the load."""
        names = list(self.verifiers)
        for i, name in enumerate(names):
            mine = [ref for j, ref in enumerate(self.refs.values()) if j % len(names) == i % len(self.refs)]
            self.verifiers[name].assign(mine)

    def report(self, obey: bool) -> None:
        """Every member reports; verifiers obey what they are told, if they are to."""
        now = time.monotonic()
        for name, child in self.drafters.items():
            stats = msgspec.convert(child.ask("stats"), DrafterStats)
            self.coordinator.report(name, "bench", "ready", now, drafter=stats)
        for name, verifier in self.verifiers.items():
            orders = self.coordinator.report(name, "bench", "ready", now, verifier=verifier.client.stats)
            if obey:
                self.changes += verifier.assign([self.refs[ref.id] for ref in orders.drafters])

    def run(self, seconds: float, obey: bool) -> None:
        """Serves for so long."""
        end, next_report = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            for verifier in self.verifiers.values():
                verifier.turn()
            if now >= next_report:
                next_report = now + REPORT_S
                self.report(obey)
            next(iter(self.verifiers.values())).client.hub.poll(0.01)

    def read(self) -> dict[str, tuple[VerifierStats, float]]:
        """Each verifier's counters and when they came."""
        found = {}
        for name, verifier in self.verifiers.items():
            found[name] = verifier.client.fresh_stats(), verifier.client.stats_at
        return found

    def close(self) -> None:
        """Ends every process."""
        for verifier in self.verifiers.values():
            verifier.client.close()
        close_all(self.children)


def measure(fleet: _Fleet, policy: str, seconds: float) -> dict[str, Any]:
    """One round under one way of assigning."""
    changes, obey = fleet.changes, policy == "goodput"
    if not obey:
        fleet.split()
    fleet.run(SETTLE_S, obey)
    before = fleet.read()
    fleet.run(seconds, obey)
    after = fleet.read()
    rates, lengths = {}, {}
    for name, (new, at) in after.items():
        old, since = before[name]
        rates[name] = (new.tokens - old.tokens) / (at - since)
        drafted = drafting_between(old, new)
        lengths[name] = 1 + drafted.accepted_tokens / drafted.drafts if drafted.drafts else None
    return {
        "policy": policy,
        "tokens_per_s": sum(rates.values()),
        "tgs": {name: rate / fleet.verifiers[name].in_flight for name, rate in rates.items()},
        "acceptance_length": lengths,
        "changes": fleet.changes - changes,
        "drafters": {name: [ref.id for ref in each.refs] for name, each in fleet.verifiers.items()},
        "handover_bytes": sum(c.handover_bytes for s, _ in after.values() for c in s.drafters.values()),
    }


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Measures and writes."""
    parser = argparse.ArgumentParser(prog="make bench-fleet", description="Assignment by goodput against a fixed split.")
    parser.add_argument("--load", default="8,1", help="requests in flight per verifier (default: 8,1)")
    parser.add_argument("--drafters", type=int, default=2, help="default: 2")
    parser.add_argument("--rounds", type=int, default=4, help="of each way of assigning (default: 4)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each round (default: 12)")
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    given = parser.parse_args(list(arguments))
    loads = [int(each) for each in given.load.split(",")]
    environment.export(ENVIRONMENT, override=False)
    with tempfile.TemporaryDirectory(prefix="orfl") as directory:
        fleet = _Fleet(Path(directory), loads, given.drafters, CoordinatorSettings())
        try:
            fleet.split()
            fleet.run(SETTLE_S, obey=False)
            rounds = []
            for number in range(given.rounds):
                for policy in ("static", "goodput") if number % 2 else ("goodput", "static"):
                    rounds.append(measure(fleet, policy, given.seconds))
                    _say(json.dumps(rounds[-1]))
            counters = fleet.coordinator.snapshot(time.monotonic()).counters
        finally:
            fleet.close()
    result = {"load": loads, "drafters": given.drafters, "seconds": given.seconds, "rounds": rounds, "counters": counters}
    totals = {p: [r["tokens_per_s"] for r in rounds if r["policy"] == p] for p in ("static", "goodput")}
    ratios = [good / fixed for good, fixed in zip(totals["goodput"], totals["static"], strict=True)]
    result["median_tokens_per_s"] = {policy: statistics.median(each) for policy, each in totals.items()}
    result["ratio"] = {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
    _say(json.dumps({key: result[key] for key in ("median_tokens_per_s", "ratio", "counters")}, indent=1))
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
