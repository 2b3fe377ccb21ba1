"""The processes that measure one target: a verifier per configuration and one drafter for all of them.  Parent process.

All stay up, idle, while others are measured; an idle verifier wakes four times a second to publish its counters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from backend.engine.client import EngineClient
from backend.fleet import DrafterRef, DrafterStats
from backend.lab.bench.children import ENVIRONMENT, Child, close_all
from backend.lab.bench.load import Load, run_load, run_phases
from backend.lab.bench.measure import Snapshot, drafting_between
from backend.lab.bench.options import PROBABILISTIC
from backend.lab.bench.pace import Pace, Paced
from backend.lab.bench.plan import Configuration, CoreSplit
from backend.lab.bench.worker import PACED
from backend.models.resolve import ResolvedModels, Say

LOADING_AT_ONCE = 2
NEVER_S = 3600 * 24.0
"""Our clients ping only while they wait, and one waits at a time."""
GPU_MEMORY_USABLE = 0.85
DRAFTER_ID = "drafter-0"
PACED_WORKER = "backend.lab.bench.paced_worker.PacedCpuWorker"


@dataclass(frozen=True)
class Bench:
    """Where a target's processes run."""

    models: ResolvedModels
    split: CoreSplit
    directory: Path
    """Sockets and logs; its path is short (a socket's may have 107 bytes)."""
    gpus: int
    longest: int
    """Tokens of a request, prompt included."""
    most: int
    """Requests in flight at most."""
    pace: Pace | None = None


class _Verifier:
    """One configuration's process and a client of it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.client = EngineClient(child.wait_ready(), "bench", child.check)
        self.last: Snapshot | None = None


class TargetFleet:
    """Use as a context: entering starts everything, leaving ends it."""

    def __init__(self, bench: Bench, configurations: Sequence[Configuration], say: Say) -> None:
        self._bench = bench
        self._configurations = list(configurations)
        self._say = say
        self._stack = ExitStack()
        self._children: list[Child] = []
        self._verifiers: dict[Configuration, _Verifier] = {}
        self._drafter: Child | None = None
        self._drafter_last: DrafterStats | None = None
        self._passes_last: Paced | None = None

    def __enter__(self) -> TargetFleet:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        self._stack.close()
        close_all(self._children)
        self._children.clear()

    def warm_up(
        self,
        configuration: Configuration,
        prompts: Sequence[list[int]],
        tokens: int,
        concurrencies: Sequence[int],
        loads: int,
        temperatures: Sequence[float] = (0.0,),
    ) -> None:
        """Runs every load that will be measured `loads` times and takes the first readings."""
        verifier = self._verifiers[configuration]
        before = verifier.client.fresh_stats()
        for concurrency, temperature in product(concurrencies, temperatures):
            for _ in range(loads):
                run_load(verifier.client, prompts[:concurrency], tokens, temperature, concurrency)
        verifier.last = self._read(configuration)
        drafts = drafting_between(before, verifier.last.verifier).drafts
        if configuration.mode != "off" and not drafts:
            self._say(f"warning: {configuration.label} drafted nothing while warming up")

    def measure(
        self,
        configuration: Configuration,
        prompts: Sequence[Sequence[list[int]]],
        tokens: int,
        temperature: float,
        concurrencies: Sequence[int],
    ) -> tuple[Load, Snapshot, Snapshot]:
        """Closed loops one after the other, and the counters before and after."""
        verifier = self._verifiers[configuration]
        # Nothing was asked of it since, and every turn ends with a reading of the drafter too.
        before = (
            replace(verifier.last, drafter=self._drafter_last, passes=self._passes_last)
            if verifier.last
            else self._read(configuration)
        )
        load = run_phases(verifier.client, prompts, tokens, temperature, concurrencies)
        verifier.last = self._read(configuration)
        return load, before, verifier.last

    def _read(self, configuration: Configuration) -> Snapshot:
        drafter = self._drafter if configuration.is_remote else None
        if drafter is not None:
            drafter.send("stats")
        client = self._verifiers[configuration].client
        stats = client.fresh_stats()
        if drafter is not None:
            self._drafter_last = msgspec.convert(drafter.answer(), DrafterStats)
        if self._bench.pace is None:
            return Snapshot(stats, client.stats_at, self._drafter_last)
        steps = msgspec.convert(self._verifiers[configuration].child.ask(PACED), Paced)
        if drafter is not None:
            self._passes_last = msgspec.convert(drafter.ask(PACED), Paced)
        return Snapshot(stats, client.stats_at, self._drafter_last, steps, self._passes_last)

    def _start(self) -> None:
        remote = [c for c in self._configurations if c.is_remote]
        refs: list[DrafterRef] = []
        if remote:
            self._drafter = self._spawn(self._drafter_job())
            refs = [DrafterRef(DRAFTER_ID, "bench", self._drafter.wait_ready(), "", 1)]
        for at in range(0, len(self._configurations), LOADING_AT_ONCE):
            batch = self._configurations[at : at + LOADING_AT_ONCE]
            self._say(f"loading {', '.join(c.name for c in batch)}")
            loading = [(configuration, self._spawn(self._verifier_job(configuration))) for configuration in batch]
            for configuration, child in loading:
                verifier = self._verifiers[configuration] = _Verifier(child)
                self._stack.callback(verifier.client.close)
        for configuration in remote:
            self._verifiers[configuration].child.ask(msgspec.to_builtins(refs))

    def _spawn(self, job: dict[str, Any]) -> Child:
        child = Child(job, self._bench.directory / f"{job['name']}.log")
        self._children.append(child)
        return child

    def _drafter_job(self) -> dict[str, Any]:
        bench = self._bench
        return {
            "role": "drafter",
            "name": DRAFTER_ID,
            "cores": bench.split.drafter,
            "environment": ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": str(bench.gpus - 1)} if bench.gpus > 1 else {}),
            "target_dir": bench.models.target_dir,
            "head_dir": bench.models.drafter_dir,
            "settings": {"cores": len(bench.split.drafter)},
            "pace": msgspec.to_builtins(bench.pace),
            "address": f"ipc://{bench.directory}/{DRAFTER_ID}",
        }

    def _verifier_job(self, configuration: Configuration) -> dict[str, Any]:
        bench = self._bench
        number = self._configurations.index(configuration)
        return {
            "role": "verifier",
            "name": configuration.name,
            "cores": configuration.cores,
            "environment": ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": "0"} if bench.gpus else {}),
            "paths": msgspec.to_builtins(bench.models),
            "settings": verifier_settings(bench, configuration, len(self._configurations)),
            "pace": msgspec.to_builtins(bench.pace),
            "address": f"ipc://{bench.directory}/v{number}-{os.urandom(2).hex()}",
        }


def verifier_settings(bench: Bench, configuration: Configuration, verifiers: int) -> dict[str, Any]:
    """What `Settings` are made of.  On a GPU the verifiers, which are all up at once, share its memory evenly."""
    engine_args: dict[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_USABLE / (verifiers + 1)} if bench.gpus else {}
    if bench.pace is not None:
        engine_args["worker_cls"] = PACED_WORKER
    if configuration.mode == PROBABILISTIC:
        engine_args["speculative_config"] = {"draft_sample_method": "probabilistic"}
    return {
        "mode": configuration.served,
        "num_speculative_tokens": configuration.k or 4,
        "verifier": {
            "cores": len(configuration.cores),
            "gateway_lease_s": NEVER_S,
            "max_num_seqs": max(64, bench.most),
            "max_model_len": bench.longest,
            "engine_args": engine_args,
            **({"ahead_outcomes": configuration.outcomes} if configuration.outcomes else {}),
        },
    }
