"""What different drafters bring the same target: each alone, and several of which every request gets one.

    python -m backend.lab.bench.drafters --sets demo backend/models/demo/draft-model demo+backend/models/demo/draft-model

One verifier in mode `auto` is given each set of drafters in turn, in alternating rounds; another one decodes plainly.  `A=B`
gives each request one of two by its id alone.  Drafters share the drafter's core.  Prints a table, and writes it where
`--output` says.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from backend.config import Settings
from backend.engine.client import EngineClient
from backend.fleet import DrafterRef
from backend.lab.bench.children import ENVIRONMENT, Child
from backend.lab.bench.load import run_load
from backend.lab.bench.measure import drafting_between
from backend.lab.bench.plan import CoreSplit, split_cores
from backend.lab.bench.prompts import Prompts
from backend.lab.bench.run import prepare
from backend.models.resolve import ResolvedModels, resolve

NEVER_S = 24 * 3600.0
LEARNING = 2
"""Loads before the first measured one."""


@dataclass
class Measured:
    """One load: tokens per second, and tokens per verification of drafts."""

    tokens_per_s: float
    length: float


@dataclass
class Place:
    """Where the processes run."""

    models: ResolvedModels
    split: CoreSplit
    directory: Path
    stack: ExitStack

    def child(self, job: dict[str, Any]) -> Child:
        """A process, ended with the place."""
        child = Child({"environment": ENVIRONMENT, **job}, self.directory / f"{job['name']}.log")
        self.stack.callback(child.close)
        return child

    def drafter(self, number: int, name: str) -> DrafterRef:
        """A running one."""
        own = resolve(Settings.model_validate({"mode": "sync", "drafter": name}), lambda line: None)
        fleets = own.drafter_kind == "eagle"
        job: dict[str, Any] = {
            "role": "drafter",
            "name": f"drafter-{number}",
            "cores": self.split.drafter,
            "target_dir": self.models.target_dir,
            "head_dir": self.models.drafter_dir if fleets else own.drafter_dir,
            "settings": {"cores": len(self.split.drafter)},
            "address": f"ipc://{self.directory}/d{number}",
        }
        return DrafterRef(f"drafter-{number}", "bench", self.child(job).wait_ready(), "", 1, "" if fleets else name, fleets)

    def verifier(self, mode: str, lookup: bool = True) -> tuple[Child, EngineClient]:
        """A running one and a client."""
        own = {"cores": len(self.split.verifier), "gateway_lease_s": NEVER_S, "lookup": lookup, "fixed_responses": True}
        settings, name = {"mode": mode, "verifier": own}, f"{mode}{'' if lookup else '-alone'}"
        child = self.child(
            {
                "role": "verifier",
                "name": name,
                "cores": self.split.verifier,
                "paths": msgspec.to_builtins(self.models),
                "settings": settings,
                "address": f"ipc://{self.directory}/{name}",
            }
        )
        client = EngineClient(child.wait_ready(), "bench", child.check)
        self.stack.callback(client.close)
        return child, client


def measure(client: EngineClient, prompts: Sequence[list[int]], tokens: int, temperature: float, requests: int) -> Measured:
    """One closed loop."""
    before = client.fresh_stats()
    load = run_load(client, prompts, tokens, temperature, requests)
    grown = drafting_between(before, client.fresh_stats())
    return Measured(load.tokens_per_s, 1 + grown.accepted_tokens / grown.drafts if grown.drafts else 1.0)


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m backend.lab.bench.drafters", description=__doc__)
    parser.add_argument(
        "--sets", nargs="+", required=True, help="drafters, A+B: of which each request gets the better, A=B: either"
    )
    parser.add_argument("--target", default="S", help="demo, or widened to S or L")
    parser.add_argument("--domains", default="code", help="code,prose: requests of both, by turns")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[tuple[float, int, str], list[Measured]] = {}
    points = [(float(t), int(n)) for t in given.temperatures.split(",") for n in given.concurrency.split(",")]
    with tempfile.TemporaryDirectory(dir="/tmp") as name, ExitStack() as stack:
        split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
        models = prepare(given.target, resolve(Settings.model_validate({"mode": "sync"}), print), Path(name))
        place = Place(models, split, Path(name), stack)
        names = sorted({each for those in given.sets for each in those.replace("=", "+").split("+")})
        refs = {each: place.drafter(number, each) for number, each in enumerate(names)}
        (_, plain), (auto, client) = place.verifier("off"), place.verifier("auto")
        make, domains = Prompts(models.target_dir, 128), given.domains.split(",")
        for turn in range(-1, given.rounds):
            for asked in ("off", *given.sets):
                those = [refs[each] for each in asked.replace("=", "+").split("+")] if asked != "off" else []
                if "=" in asked:
                    those = [msgspec.structs.replace(ref, head="") for ref in those]
                auto.ask(msgspec.to_builtins(those))
                for point in points:
                    for load in range(1 if turn >= 0 else LEARNING):
                        prompts = [
                            make.make(domains[i % len(domains)], f"{turn}/{load}/{point}/{i}") for i in range(given.requests)
                        ]
                        one = measure(plain if asked == "off" else client, prompts, given.tokens, *point)
                        if turn >= 0:
                            found.setdefault((*point, asked), []).append(one)
            print(f"round {turn + 1} of {given.rounds}", flush=True)
    lines = table(found, points, given.sets)
    print("\n".join(lines))
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(
    found: dict[tuple[float, int, str], list[Measured]], points: Sequence[tuple[float, int]], sets: Sequence[str]
) -> list[str]:
    """Medians over the rounds, with the least and the greatest of a ratio."""
    lines = [
        "| temperature | requests | drafter | tokens/s | of plain decoding | tokens per drafted verification |",
        "|---|---|---|---|---|---|",
    ]
    for point in points:
        base = [each.tokens_per_s for each in found[(*point, "off")]]
        lines.append(f"| {point[0]:g} | {point[1]} | none | {median(base):.0f} | | |")
        for asked in sets:
            rows = found[(*point, asked)]
            ratios = [row.tokens_per_s / plain for row, plain in zip(rows, base, strict=True)]
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            speed, length = median(row.tokens_per_s for row in rows), median(row.length for row in rows)
            lines.append(f"| {point[0]:g} | {point[1]} | {asked} | {speed:.0f} | {spread} | {length:.2f} |")
    return lines


if __name__ == "__main__":
    main()
