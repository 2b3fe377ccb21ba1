"""`make bench-fleet`: the assignment rule against a fixed split, on real engines under skewed loads.  Parent process.

    python -m backend.lab.bench.assign [--load 8,1 "8,0>0,8" 8,8@1] [--drafters 2] [--rounds 3] [--seconds 8] [--output FILE]

Verifiers and drafters are processes on this machine; the coordinator's policy runs here and is fed with the members' own
reports, four times a second (`assign_fleet.py`).  A load says how many requests each verifier has in flight, all the time;
behind `@` the temperature, between `>` what follows within a round.  Rounds alternate between the ways of assigning; the fixed
ones are pins.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config import environment
from backend.coordinator.assignment import Pair
from backend.coordinator.water_filling import predicted
from backend.lab.bench import hardware
from backend.lab.bench.assign_fleet import LAYOUTS, BenchFleet, Reading
from backend.lab.bench.assign_report import markdown, summary
from backend.lab.bench.children import ENVIRONMENT
from backend.lab.bench.measure import drafting_between

LOADS = ("8,1", "8,0", "16,0", "16,4", "4,4", "8,0>0,8")
WAYS = ("rule", "static", "gathered")
"""`rule`: as when serving; `static`: drafters are dealt out one by one, whatever the load; `gathered`: all to the verifier with
the most requests."""
WARM_UP_S = 4.0
CALM_S = 15.0
"""Before a steady load is watched."""


@dataclass(frozen=True)
class Load:
    """Requests in flight at each verifier, phase by phase."""

    name: str
    phases: tuple[tuple[int, ...], ...]
    temperatures: tuple[float, ...]


def parse_load(text: str) -> Load:
    """Reads `8,1`, `8@1,8` or `8,0>0,8`.  Raises `ValueError`."""
    phases: list[tuple[int, ...]] = []
    temperatures: tuple[float, ...] = ()
    for phase in text.split(">"):
        parts = [part.partition("@") for part in phase.split(",")]
        phases.append(tuple(int(number) for number, _, _ in parts))
        temperatures = temperatures or tuple(float(given) if given else 0.0 for _, _, given in parts)
    if len({len(phase) for phase in phases}) > 1 or min(min(phase) for phase in phases) < 0:
        raise ValueError(f"{text!r}: every phase names the requests of every verifier")
    return Load(text, tuple(phases), temperatures)


def pins_of(way: str, load: Load, drafters: Sequence[str]) -> dict[str, list[str]] | None:
    """Who drafts for whom in a fixed way; None: the policy decides."""
    verifiers = len(load.phases[0])
    if way == "rule":
        return None
    if way == "gathered":
        most = max(range(verifiers), key=lambda v: sum(phase[v] for phase in load.phases))
        return {drafter: [f"v{most}"] for drafter in drafters}
    # Where drafters are fewer, verifiers share them.
    few = len(drafters)
    return {d: [f"v{v}" for v in range(verifiers) if v == i % verifiers or v % few == i] for i, d in enumerate(drafters)}


def measure(fleet: BenchFleet, load: Load, way: str, seconds: float, settle_s: float) -> dict[str, Any]:
    """One round under one way of assigning."""
    changes = fleet.changes
    fleet.hold(pins_of(way, load, list(fleet.refs)))
    fleet.load(load.phases[0], load.temperatures)
    fleet.run(settle_s)
    for verifier in fleet.verifiers.values():
        verifier.plans.clear()
    settled, before = fleet.changes, fleet.read()
    for phase in load.phases:
        fleet.load(phase, load.temperatures)
        fleet.run(seconds / len(load.phases))
    after = fleet.read()
    situation = fleet.coordinator.situation(after.at)
    fixed = {way: pins_of(way, load, list(fleet.refs)) for way in WAYS}
    promised = {way: predicted(situation, _pairs(pins)) for way, pins in fixed.items() if pins is not None}
    held = {name: [ref.id for ref in each.refs] for name, each in fleet.verifiers.items()}
    plans = {name: dict(each.plans.most_common(4)) for name, each in fleet.verifiers.items()}
    found = {
        "load": load.name,
        "way": way,
        "seconds": seconds,
        "changes": settled - changes,
        "changes_measured": fleet.changes - settled,
    }
    known = {each.id: dataclasses.asdict(each) for each in situation.verifiers}
    known |= {each.id: {"fixed_s": each.fixed_s, "per_request_s": each.per_request_s} for each in situation.drafters}
    return found | figures(before, after) | {"plans": plans, "drafters": held, "predicted": promised, "known": known}


def _pairs(pins: Mapping[str, Sequence[str]]) -> list[Pair]:
    return [(verifier, drafter) for drafter, verifiers in pins.items() for verifier in verifiers]


def figures(before: Reading, after: Reading) -> dict[str, Any]:
    """What happened between two readings."""
    wall = after.at - before.at
    by_verifier = {}
    for name, (new, at) in after.verifiers.items():
        old, since = before.verifiers[name]
        drafted, steps = drafting_between(old, new), new.steps - old.steps
        by_verifier[name] = {
            "tokens_per_s": (new.tokens - old.tokens) / (at - since),
            "acceptance_length": 1 + drafted.accepted_tokens / drafted.drafts if drafted.drafts else None,
            "drafted_share": drafted.drafts / max(new.verifications - old.verifications, 1),
            "t_verify_ms": (new.verify_s - old.verify_s) / steps * 1e3 if steps else None,
            "step_ms": (new.decode_s - old.decode_s) / max(new.decode_steps - old.decode_steps, 1) * 1e3,
            "idle_awaiting_draft": (new.idle_s["awaiting_draft"] - old.idle_s["awaiting_draft"]) / (at - since),
        }
    drafters = {}
    for name, new_d in after.drafters.items():
        old_d = before.drafters[name]
        batches = new_d.batches - old_d.batches
        drafters[name] = {
            "t_draft_ms": (new_d.draft_s - old_d.draft_s) / batches * 1e3 if batches else None,
            "requests_per_batch": (new_d.drafts - old_d.drafts) / batches if batches else None,
        }
    return {
        "tokens_per_s": sum(each["tokens_per_s"] or 0.0 for each in by_verifier.values()),
        "cores_used": {name: (cpu - before.cpu_s[name]) / wall for name, cpu in after.cpu_s.items()},
        "verifiers": by_verifier,
        "by_drafter": drafters,
    }


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Measures and writes."""
    given = _parser().parse_args(list(arguments))
    loads, ways = [parse_load(each) for each in given.load], list(given.ways)
    environment.export(ENVIRONMENT, override=False)
    about = _about(arguments)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="orfl") as directory:
        fleet = BenchFleet(Path(directory), len(loads[0].phases[0]), given.drafters, given.layout)
        try:
            for load in loads:
                fleet.hold(pins_of("static", load, list(fleet.refs)))
                fleet.load(load.phases[0], load.temperatures)
                fleet.run(WARM_UP_S)
                for number in range(given.rounds):
                    for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                        rounds.append(measure(fleet, load, way, given.seconds, given.settle))
                        _say(json.dumps(rounds[-1]))
                _say(f"{load.name}: {json.dumps(summary([r for r in rounds if r['load'] == load.name], ways))}")
            steady = measure(fleet, loads[0], "rule", given.steady, CALM_S) if given.steady else None
            counters = fleet.coordinator.snapshot(time.monotonic()).counters
        finally:
            fleet.close()
    by_load = {load.name: summary([r for r in rounds if r["load"] == load.name], ways) for load in loads}
    result = {"about": about, "layout": given.layout, "cores": fleet.cores, "seconds": given.seconds, "counters": counters}
    result |= {"loads": by_load, "steady": steady, "rounds": rounds}
    _say(markdown(result))
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
        given.output.with_suffix(".md").write_text(markdown(result))
    return result


def _about(arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "commit": hardware.commit(),
        "hardware": hardware.describe(tuple(sorted(os.sched_getaffinity(0)))),
        "command": shlex.join(["python", "-m", "backend.lab.bench.assign", *arguments]),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-fleet", description="The assignment rule against a fixed split.")
    say = parser.add_argument
    say("--load", nargs="+", default=list(LOADS), metavar="LOAD", help=f"requests in flight (default: {' '.join(LOADS)})")
    say("--ways", nargs="+", default=["rule", "static"], choices=WAYS, help="default: rule static")
    say("--layout", choices=LAYOUTS, default="as-served", help="which member runs on which cores (default: as-served)")
    say("--drafters", type=int, default=2, help="default: 2")
    say("--rounds", type=int, default=3, help="of each way of assigning (default: 3)")
    say("--seconds", type=float, default=8.0, help="of each round (default: 8)")
    say("--settle", type=float, default=3.0, help="seconds of each round before it is measured (default: 3)")
    say("--steady", type=float, default=60.0, help="seconds that the first load goes on, for counting changes (default: 60)")
    say("--output", type=Path, help="write the figures there as JSON, and a page beside them")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
