"""The benchmark's loop: target by target, round by round, all configurations in turn.  Parent process, its main thread."""

import math
import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from backend.config import Settings
from backend.config.sources import Say
from backend.lab.bench import tables
from backend.lab.bench.engines import Processes, TargetFleet
from backend.lab.bench.hardware import gpus
from backend.lab.bench.measure import Measurement, Results, sample
from backend.lab.bench.options import AUTO_LEARNS, WARM_UP_TOKENS
from backend.lab.bench.plan import Cell, cells, configurations, points
from backend.lab.bench.prompts import Prompts
from backend.lab.bench.widen import SIZES, widen
from backend.models.head_config import read_config
from backend.models.resolve import ResolvedModels, resolve
from backend.models.tensor_files import TensorFiles

SPARE_POSITIONS = 64
"""Tokens of context beyond the longest answer, for drafts that reach past its end."""


def run(results: Results, output: Path, say: Say) -> None:
    """Measures everything, and writes the results; after an interruption those so far, marked as incomplete."""
    options = results.options
    # This process measures, and does not disturb the verifier.
    os.sched_setaffinity(0, results.split.drafter)
    try:
        with tempfile.TemporaryDirectory(prefix="outrider-") as name:
            own = {"model": options.model, "drafter": options.drafter} if options.model else {}
            base = resolve(Settings.model_validate(own), say)
            for target in options.targets:
                directory = Path(name) / target
                directory.mkdir()
                models = prepare(target, base, directory)
                results.targets[target] = describe_target(models)
                say(f"target {target}: {results.targets[target]}")
                with Processes(models, results.split, directory, len(gpus()), options.pace) as processes:
                    _measure_target(target, processes, results, output, say)
        results.complete = True
    finally:
        if results.samples:
            tables.write(output, results, say)


def prepare(target: str, base: ResolvedModels, directory: Path) -> ResolvedModels:
    """The models of a target; a widened one is written to `directory`."""
    if target not in SIZES:
        return base
    widen(Path(base.target_dir), directory / "target", *SIZES[target])
    return msgspec.structs.replace(base, target_dir=str(directory / "target"), name=target)


def describe_target(models: ResolvedModels) -> dict[str, Any]:
    """A target's name and sizes, from its configuration and the headers of its tensor files."""
    config = read_config(models.target_dir)
    total = sum(math.prod(info.shape) for info in TensorFiles(models.target_dir).tensors.values())
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    return {"model": models.name, "parameters": total} | {name: config[name] for name in names if name in config}


def _measure_target(target: str, processes: Processes, results: Results, output: Path, say: Say) -> None:
    options, most = results.options, max(results.options.concurrency)
    prompts = Prompts(processes.models.target_dir, options.prompt_tokens)
    configured = configurations(options, processes.models.drafter_kind)
    schedule = list(cells(configured, points(options), options.rounds))
    fleet = TargetFleet(processes, configured, options.prompt_tokens + options.tokens + SPARE_POSITIONS, most, say)
    say(f"{target}: warming up")
    for configuration in configured:
        first = [prompts.make(f"warm/{i}") for i in range(most)]
        tokens = min(WARM_UP_TOKENS, options.tokens)
        loads = options.warm_ups * (AUTO_LEARNS if configuration.mode == "auto" else 1)
        fleet.warm_up(configuration, first, tokens, options.concurrency, loads, options.temperatures)
    began = time.monotonic()
    for number, cell in enumerate(schedule, 1):
        configuration, point = cell.configuration, cell.point
        texts = _prompts_of(cell, prompts, options)
        load, before, after = fleet.measure(configuration, texts, options.tokens, point.temperature, point.concurrency)
        measured = sample(cell.round, configuration, load, before, after, results.split)
        results.samples.setdefault((target, configuration, point), []).append(measured)
        if point.temperature == 0:
            alike = results.greedy.setdefault((target, point, cell.round), {})
            alike[configuration] = [answer.tokens for answer in load.answers]
        tables.keep(output, results)
        left_s = (time.monotonic() - began) / number * (len(schedule) - number)
        say(_progress(target, cell, measured, f"{number}/{len(schedule)}", left_s))


def _prompts_of(cell: Cell, prompts: Prompts, options: Namespace) -> list[list[int]]:
    """A cell's prompts: the same for all configurations, different in every round and at every point."""
    count = max(options.requests, options.waves * cell.point.concurrency)
    return [prompts.make(f"{cell.round}/{cell.point.name}/{i}") for i in range(count)]


def _progress(target: str, cell: Cell, measured: Measurement, place: str, left_s: float) -> str:
    facts = [f"{measured.tokens_per_s:.0f} tok/s"]
    if measured.acceptance_length is not None:
        facts.append(f"acceptance length {measured.acceptance_length:.2f}")
    if cell.configuration.is_remote:
        facts.append(f"awaiting drafts {measured.idle_awaiting_draft:.0%}")
    left = f"{left_s / 60:.0f} min left" if left_s > 90 else f"{left_s:.0f} s left"
    return f"[{place}] {target} {cell.configuration.label} {cell.point.name}: {', '.join(facts)}; {left}"
