"""Measures how a learning head improves under load; prints a line of JSON per window of requests.

    python -m backend.lab.experiments.learning --plan code:0.8:600 --learned DIR
    python -m backend.lab.experiments.learning --plan prose:0.8:400,code:0.8:200 --learned DIR

There is one verifier in mode `sync`, without look-ups, and one drafter, whose trainer runs on the same core.  `--plan`: domain,
temperature and seconds of each phase.  DIR is the learning directory; learning goes on from its content.  `length` is the
acceptance length.

`--reference HEAD`: first measures length and speed of a head that does not learn, under the load of each phase.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from backend.config import Settings
from backend.lab.bench.engines import Bench, Processes, assign
from backend.lab.bench.load import run_load
from backend.lab.bench.measure import drafting_between
from backend.lab.bench.plan import CoreSplit, split_cores
from backend.lab.bench.prompts import Prompts
from backend.models.resolve import resolve
from backend.wire.engine import RequestOptions

CONCURRENCY, REQUESTS, TOKENS, PROMPT = 4, 12, 96, 96
"""Of a window: requests in flight, requests in all, and tokens of each answer and prompt."""
LEARNED = ("version", "steps", "training_s", "sequences", "loss", "present_length", "candidate_length", "live_acceptance",
           "taken_back")  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A period of load of one kind."""

    domain: str
    temperature: float
    seconds: float


class LearningFleet:
    """A verifier, whose drafters change, and a client of it."""

    def __init__(self, processes: Processes) -> None:
        self.verifier = processes.verifier("verifier", {"mode": "sync", "verifier": {"lookup": False}})
        self._client = processes.client(self.verifier)

    def window(self, prompts: Sequence[list[int]], temperature: float) -> dict[str, Any]:
        before = self._client.fresh_stats()
        load = run_load(self._client, prompts, TOKENS, temperature, CONCURRENCY, RequestOptions())
        grown = drafting_between(before, self._client.fresh_stats())
        length = round(1 + grown.accepted_tokens / grown.drafts, 3) if grown.drafts else None
        return {"tokens_per_s": round(load.tokens_per_s, 1), "length": length, "drafts": grown.drafts}


def refer(head: str, phases: Sequence[Phase], directory: Path, split: CoreSplit) -> None:
    """Measures and prints length and speed of a head that does not learn."""
    models = resolve(Settings.model_validate({"mode": "sync", "drafter": head}), lambda line: None)
    with Processes(Bench(models, split, directory)) as processes:
        fleet = LearningFleet(processes)
        assign(fleet.verifier, [processes.drafter("drafter-0", models.drafter_dir)[1]])
        for domain, temperature in dict.fromkeys((phase.domain, phase.temperature) for phase in phases):
            make = Prompts(models.target_dir, PROMPT)
            windows = [
                fleet.window([make.make(domain, f"r{turn}/{i}") for i in range(REQUESTS)], temperature) for turn in range(4)
            ][1:]
            found = {name: median(each[name] for each in windows) for name in ("length", "tokens_per_s")}
            say({"reference": head, "domain": domain, "temperature": temperature} | found)


def learn(processes: Processes, phases: Sequence[Phase]) -> None:
    fleet = LearningFleet(processes)
    make = Prompts(processes.bench.models.target_dir, PROMPT)
    drafter, ref = processes.drafter("drafter-0", processes.bench.models.drafter_dir)
    assign(fleet.verifier, [ref])
    began, turn = time.monotonic(), 0
    for phase in phases:
        until = time.monotonic() + phase.seconds
        while time.monotonic() < until:
            turn += 1
            prompts = [make.make(phase.domain, f"{began}/{turn}/{i}") for i in range(REQUESTS)]
            found = fleet.window(prompts, phase.temperature)
            line = {"s": round(time.monotonic() - began), "domain": phase.domain, "temperature": phase.temperature, **found}
            news = drafter.ask("stats").learning
            say(line | ({name: getattr(news, name) for name in LEARNED} if news is not None else {}))


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def phases_of(text: str) -> list[Phase]:
    """Parses phases such as `code:0.8:600,prose:0:300`."""
    return [Phase(a, float(b), float(c)) for a, b, c in (each.split(":") for each in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m backend.lab.experiments.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", type=phases_of, required=True)
    parser.add_argument("--learned", type=Path, required=True)
    parser.add_argument("--reference")
    given = parser.parse_args()
    split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        if given.reference:
            refer(given.reference, given.plan, Path(name), split)
        learning = {"learning_dir": str(given.learned.resolve())}
        settings = Settings.model_validate({"mode": "sync", "drafter": "grow", "drafting": learning})
        with Processes(Bench(resolve(settings, lambda line: None), split, Path(name))) as processes:
            learn(processes, given.plan)


if __name__ == "__main__":
    main()
