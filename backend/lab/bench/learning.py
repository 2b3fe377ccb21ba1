"""Measures how a learning head improves under load; prints a line of JSON per window of requests.

    python -m backend.lab.bench.learning --plan code:0.8:600 --learned DIR
    python -m backend.lab.bench.learning --plan prose:0.8:400,code:0.8:200 --learned DIR --frozen
    python -m backend.lab.bench.learning --plan code:0.8:120 --learned DIR --pauses

There is one verifier in mode `sync`, without look-ups, and one drafter, whose trainer runs on the same core.  `--plan`: domain,
temperature and seconds of each phase.  DIR is the learning directory; learning goes on from its content.  `length` is the
acceptance length.

`--reference HEAD`: first measures length and speed of a head that does not learn, under the load of each phase.
`--frozen`: in every fourth window a second drafter drafts, which has the initial head and whose trainer is stopped.
`--pauses`: the trainer is stopped in every other window; the last line compares the speeds of both kinds of window.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from backend.config import Settings
from backend.lab.bench.children import Child
from backend.lab.bench.engines import Bench, Processes, assign, measure_load
from backend.lab.bench.plan import CoreSplit, split_cores
from backend.lab.bench.prompts import Prompts
from backend.models.resolve import resolve
from backend.wire.engine import RequestOptions

CONCURRENCY, REQUESTS, TOKENS, PROMPT = 4, 12, 96, 96
"""Of a window: requests in flight, requests in all, and tokens of each answer and prompt."""
FROZEN_ONE_IN = 4
LEARNED = ("version", "steps", "training_s", "sequences", "loss", "present_length", "candidate_length", "live_acceptance",
           "taken_back")  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A period of load of one kind."""

    domain: str
    temperature: float
    seconds: float


class Fleet:
    """A verifier, whose drafters change, and a client of it."""

    def __init__(self, processes: Processes) -> None:
        self.verifier = processes.verifier("verifier", {"mode": "sync", "verifier": {"lookup": False}})
        self._client = processes.client(self.verifier)

    def window(self, prompts: Sequence[list[int]], temperature: float) -> dict[str, Any]:
        found = measure_load(self._client, prompts, TOKENS, temperature, CONCURRENCY, RequestOptions())
        length = round(found.length, 3) if found.drafts else None
        return {"tokens_per_s": round(found.tokens_per_s, 1), "length": length, "drafts": found.drafts}


def trainer_of(drafter: Child) -> int:
    """Waits until the drafter's trainer runs; returns the trainer's process id."""
    while True:
        drafter.check()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # that process has ended
            if parent == drafter.process.pid and b"backend.learning.trainer" in words:
                return int(path.name)
        time.sleep(0.1)


def refer(head: str, phases: Sequence[Phase], directory: Path, split: CoreSplit) -> None:
    """Measures and prints length and speed of a head that does not learn."""
    models = resolve(Settings.model_validate({"mode": "sync", "drafter": head}), lambda line: None)
    with Processes(Bench(models, split, directory)) as processes:
        fleet = Fleet(processes)
        assign(fleet.verifier, [processes.drafter("drafter-0", models.drafter_dir)[1]])
        for domain, temperature in dict.fromkeys((phase.domain, phase.temperature) for phase in phases):
            make = Prompts(models.target_dir, PROMPT)
            windows = [
                fleet.window([make.make(domain, f"r{turn}/{i}") for i in range(REQUESTS)], temperature) for turn in range(4)
            ][1:]
            found = {name: median(each[name] for each in windows) for name in ("length", "tokens_per_s")}
            say({"reference": head, "domain": domain, "temperature": temperature} | found)


def learn(processes: Processes, given: argparse.Namespace) -> None:
    fleet, models = Fleet(processes), processes.bench.models
    make = Prompts(models.target_dir, PROMPT)
    assert models.learning_dir is not None
    frozen = None
    if given.frozen:
        learned = Path(models.learning_dir)
        shutil.rmtree(learned / "frozen", ignore_errors=True)
        shutil.copytree(learned / "drafter-0", learned / "frozen", ignore=shutil.ignore_patterns("lock"))
        still, frozen = processes.drafter("frozen", models.drafter_dir)
        os.kill(trainer_of(still), signal.SIGSTOP)
    drafter, ref = processes.drafter("drafter-0", models.drafter_dir)
    trainer = trainer_of(drafter)
    began, turn = time.monotonic(), 0
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for phase in given.plan:
        until = time.monotonic() + phase.seconds
        while time.monotonic() < until:
            turn += 1
            drafts = frozen if frozen is not None and turn % FROZEN_ONE_IN == 0 else ref
            assign(fleet.verifier, [drafts])
            trains = not given.pauses or turn % 2 == 0
            os.kill(trainer, signal.SIGCONT if trains else signal.SIGSTOP)
            prompts = [make.make(phase.domain, f"{began}/{turn}/{i}") for i in range(REQUESTS)]
            found = fleet.window(prompts, phase.temperature)
            speeds[trains].append(found["tokens_per_s"])
            line = {"s": round(time.monotonic() - began), "domain": phase.domain, "temperature": phase.temperature, **found}
            news: dict[str, Any] = drafter.ask({}).get("learning") or {}
            line |= {"drafter": drafts.id, "trains": trains} | {name: news[name] for name in LEARNED if name in news}
            say(line)
    if given.pauses:
        pairs = [a / b for a, b in zip(speeds[True], speeds[False], strict=False)]
        say({"with_over_without_training": median(pairs), "least": min(pairs), "greatest": max(pairs), "pairs": len(pairs)})


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def phases_of(text: str) -> list[Phase]:
    """Parses phases such as `code:0.8:600,prose:0:300`."""
    return [Phase(a, float(b), float(c)) for a, b, c in (each.split(":") for each in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m backend.lab.bench.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=phases_of, required=True)
    parser.add_argument("--learned", type=Path, required=True)
    parser.add_argument("--reference")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--pauses", action="store_true")
    given = parser.parse_args()
    split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        if given.reference:
            refer(given.reference, given.plan, Path(name), split)
        learning = {"learning_dir": str(given.learned.resolve())}
        settings = Settings.model_validate({"mode": "sync", "drafter": "grow", "drafting": learning})
        with Processes(Bench(resolve(settings, lambda line: None), split, Path(name))) as processes:
            learn(processes, given)


if __name__ == "__main__":
    main()
