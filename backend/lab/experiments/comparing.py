"""The frame of benchmarks that compare ways of drafting for one target, in alternating rounds.  Parent process."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from backend.config import Settings
from backend.engine.client import EngineClient
from backend.fleet import DrafterRef
from backend.lab.bench.children import Child
from backend.lab.bench.engines import Bench, LoadResult, Processes
from backend.lab.bench.markdown import spread, table
from backend.lab.bench.plan import split_cores
from backend.lab.bench.run import prepare
from backend.models.resolve import resolve

NONE = "none"
"""The way of drafting of plain decoding, with which others are compared."""
LEARNING = 2
"""Loads before the first measured one, from which the verifier learns step times and acceptance."""
Cell = TypeVar("Cell")
Result = TypeVar("Result")


def options(module: str, about: str | None, tokens: int) -> argparse.ArgumentParser:
    """A parser with the options that these benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m backend.lab.experiments.{module}", description=about)
    parser.add_argument("--target", default="S", help="demo, or widened to S or L")
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def points(temperatures: str, concurrency: str) -> list[tuple[float, int]]:
    """All pairs of a temperature and a number of requests in flight, from lists with commas."""
    return [(float(t), int(n)) for t in temperatures.split(",") for n in concurrency.split(",")]


def started(target: str, stack: ExitStack) -> Processes:
    """Starts processes for a target: the demo, or one widened as `--target` says.  All of them end with the stack."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
    models = prepare(target, resolve(Settings.model_validate({"mode": "sync"}), lambda line: None), directory)
    split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
    return stack.enter_context(Processes(Bench(models, split, directory)))


def drafter(processes: Processes, number: int, name: str) -> DrafterRef:
    """Starts a drafter; `name` is a value of `--drafter`."""
    own = resolve(Settings.model_validate({"mode": "sync", "drafter": name}), lambda line: None)
    fleets = own.drafter_kind == "eagle"
    _, ref = processes.drafter(f"drafter-{number}", processes.bench.models.drafter_dir if fleets else own.drafter_dir)
    return msgspec.structs.replace(ref, head="" if fleets else name, takes_features=fleets)


def verifier(processes: Processes, mode: str, lookup: bool = True) -> tuple[Child, EngineClient]:
    """Starts a verifier, and connects a client to it."""
    settings = {"mode": mode, "verifier": {"lookup": lookup, "engine_args": {"async_scheduling": False}}}
    child = processes.verifier(f"{mode}{'' if lookup else '-alone'}", settings)
    return child, processes.client(child)


def in_turn(
    cells: Sequence[Cell], rounds: int, measure: Callable[[Cell, str], Result], learning: int = LEARNING
) -> dict[Cell, list[Result]]:
    """Measures all cells once a round, after `learning` measurements of each that do not count.

    `measure` also gets the load's name, from which it makes its prompts.
    """
    found: dict[Cell, list[Result]] = {cell: [] for cell in cells}
    for cell in cells:
        for load in range(learning):
            measure(cell, f"learning/{load}")
    for turn in range(rounds):
        for cell in cells:
            found[cell].append(measure(cell, str(turn)))
        sys.stderr.write(f"round {turn + 1} of {rounds}\n")
    return found


def speeds(found: Mapping[tuple[float, int, str], Sequence[LoadResult]]) -> list[str]:
    """A table by temperature, requests in flight and way of drafting; ratios are within a round, to `NONE`."""
    head = ("temperature", "in flight", "drafts", "tokens/s", "of plain decoding", "tokens per drafted verification")
    body = []
    for (temperature, requests, way), rounds in sorted(found.items(), key=lambda item: item[0][:2]):
        plain = found[temperature, requests, NONE]
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(rounds, plain, strict=True)]
        speed, length = median(each.tokens_per_s for each in rounds), median(each.length for each in rounds)
        body.append([f"{temperature:g}", str(requests), way, f"{speed:.0f}", spread(ratios, 2), f"{length:.2f}"])
    return table(head, body)
