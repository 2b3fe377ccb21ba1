"""Compares different drafters for one target: each alone, and sets of several, of which each request gets one.

    python -m backend.lab.bench.drafters --sets demo backend/models/demo/draft-model demo+backend/models/demo/draft-model

One verifier in mode `auto` gets each set of drafters in turn, in alternating rounds; another verifier decodes plainly.  With
`A+B` each request gets the drafter that drafts better for it; with `A=B` its id alone decides.  Drafters share the drafter's
core.  Prints a table, and writes it to `--output`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from backend.config import Settings
from backend.engine.client import EngineClient
from backend.fleet import DrafterRef
from backend.lab.bench.children import Child
from backend.lab.bench.engines import Processes, Speed, assign, measure_load
from backend.lab.bench.plan import split_cores
from backend.lab.bench.prompts import Prompts
from backend.lab.bench.run import prepare
from backend.models.resolve import resolve

LEARNING = 2
"""Loads before the first measured one, from which the verifier learns step times and acceptance."""


def started(target: str, stack: ExitStack) -> Processes:
    """Starts processes for a target: the demo, or one widened to a preset.  All of them end with the stack."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
    models = prepare(target, resolve(Settings.model_validate({"mode": "sync"}), lambda line: None), directory)
    split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
    return stack.enter_context(Processes(models, split, directory))


def drafter(processes: Processes, number: int, name: str) -> DrafterRef:
    """Starts a drafter; `name` is a value of `--drafter`."""
    own = resolve(Settings.model_validate({"mode": "sync", "drafter": name}), lambda line: None)
    fleets = own.drafter_kind == "eagle"
    _, ref = processes.drafter(f"drafter-{number}", processes.models.drafter_dir if fleets else own.drafter_dir)
    return msgspec.structs.replace(ref, head="" if fleets else name, takes_features=fleets)


def verifier(processes: Processes, mode: str, lookup: bool = True) -> tuple[Child, EngineClient]:
    """Starts a verifier, and connects a client to it."""
    settings = {"mode": mode, "verifier": {"lookup": lookup, "engine_args": {"async_scheduling": False}}}
    child = processes.verifier(f"{mode}{'' if lookup else '-alone'}", settings)
    return child, processes.client(child)


def main() -> None:
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
    found: dict[tuple[float, int, str], list[Speed]] = {}
    points = [(float(t), int(n)) for t in given.temperatures.split(",") for n in given.concurrency.split(",")]
    with ExitStack() as stack:
        processes = started(given.target, stack)
        names = sorted({each for those in given.sets for each in those.replace("=", "+").split("+")})
        refs = {each: drafter(processes, number, each) for number, each in enumerate(names)}
        (_, plain), (auto, client) = verifier(processes, "off"), verifier(processes, "auto")
        make, domains = Prompts(processes.models.target_dir, 128), given.domains.split(",")
        for turn in range(-1, given.rounds):
            for asked in ("off", *given.sets):
                those = [refs[each] for each in asked.replace("=", "+").split("+")] if asked != "off" else []
                if "=" in asked:
                    those = [msgspec.structs.replace(ref, head="") for ref in those]
                assign(auto, those)
                for point in points:
                    for load in range(1 if turn >= 0 else LEARNING):
                        prompts = [
                            make.make(domains[i % len(domains)], f"{turn}/{load}/{point}/{i}") for i in range(given.requests)
                        ]
                        one = measure_load(plain if asked == "off" else client, prompts, given.tokens, *point)
                        if turn >= 0:
                            found.setdefault((*point, asked), []).append(one)
            print(f"round {turn + 1} of {given.rounds}", flush=True)
    lines = table(found, points, given.sets)
    print("\n".join(lines))
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(
    found: dict[tuple[float, int, str], list[Speed]], points: Sequence[tuple[float, int]], sets: Sequence[str]
) -> list[str]:
    """The table's lines: medians over the rounds, and for ratios also minimum and maximum."""
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
