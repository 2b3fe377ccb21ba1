"""Measures how a learning head improves under load; prints a line of JSON per window of requests.

    python -m backend.lab.experiments.learning --plan code:0.8:600 --learned DIR
    python -m backend.lab.experiments.learning --plan prose:0.8:400,code:0.8:200 --learned DIR
    python -m backend.lab.experiments.learning --plan code:0.8:60 --reference HEAD

There is one verifier in mode `sync`, without look-ups, and one drafter, whose trainer runs on the same core.  `--plan`: domain,
temperature and seconds of each phase.  DIR is the learning directory; learning goes on from its content.  `length` is the
acceptance length.  HEAD is a head that does not learn, to compare with.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config import Settings
from backend.engine.client import EngineClient
from backend.lab.bench.engines import Processes
from backend.lab.bench.load import run_load
from backend.lab.bench.measure import drafting_between
from backend.lab.bench.plan import split_cores
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


def measure(processes: Processes, phases: Sequence[Phase]) -> None:
    """Runs all phases; prints a line for each window."""
    make = Prompts(processes.models.target_dir, PROMPT)
    verifier = processes.verifier("verifier", {"mode": "sync", "verifier": {"lookup": False}})
    client = processes.connect(verifier)
    drafter, ref = processes.drafter("drafter-0", processes.models.drafter_dir)
    verifier.ask([ref])
    began, turn = time.monotonic(), 0
    for phase in phases:
        until = time.monotonic() + phase.seconds
        while time.monotonic() < until:
            turn += 1
            prompts = [make.make(phase.domain, f"{began}/{turn}/{i}") for i in range(REQUESTS)]
            found = window(client, prompts, phase.temperature)
            line = {"s": round(time.monotonic() - began), "domain": phase.domain, "temperature": phase.temperature, **found}
            news = drafter.ask()[0].learning
            line |= {name: getattr(news, name) for name in LEARNED} if news is not None else {}
            print(json.dumps(line), flush=True)


def window(client: EngineClient, prompts: Sequence[list[int]], temperature: float) -> dict[str, Any]:
    before = client.fresh_stats()
    load = run_load(client, prompts, TOKENS, temperature, CONCURRENCY, RequestOptions())
    grown = drafting_between(before, client.fresh_stats())
    length = round(1 + grown.accepted_tokens / grown.drafts, 3) if grown.drafts else None
    return {"tokens_per_s": round(load.tokens_per_s, 1), "length": length, "drafts": grown.drafts}


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
    heads = parser.add_mutually_exclusive_group(required=True)
    heads.add_argument("--learned", type=Path)
    heads.add_argument("--reference")
    given = parser.parse_args()
    learning = {"drafter": "grow", "drafting": {"learning_dir": str(given.learned.resolve())}} if given.learned else {}
    settings = {"mode": "sync", "drafter": given.reference} | learning
    split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        models = resolve(Settings.model_validate(settings), lambda line: None)
        with Processes(models, split, Path(name)) as processes:
            measure(processes, given.plan)


if __name__ == "__main__":
    main()
