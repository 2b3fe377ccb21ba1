"""Starts a benchmark's verifiers and drafters, and measures one target with a fleet of them.  Parent process.

That fleet has one verifier per configuration, and one drafter for all.  They stay up, idle, while other configurations are
measured; an idle verifier wakes four times a second to publish its counters.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

from backend.engine.client import EngineClient
from backend.fleet import DrafterRef
from backend.lab.bench.children import Child, close_all
from backend.lab.bench.load import MeasuredLoad, run_load
from backend.lab.bench.measure import Snapshot, drafting_between
from backend.lab.bench.options import PROBABILISTIC
from backend.lab.bench.pace import Pace
from backend.lab.bench.plan import Configuration, CoreSplit
from backend.lab.bench.worker import PACED
from backend.launch.fleet import prepare_process
from backend.models.resolve import ResolvedModels, Say

LOADING_AT_ONCE = 2
GPU_MEMORY_USABLE = 0.85
DRAFTER_ID = "drafter-0"
PACED_WORKER = "backend.lab.bench.paced_worker.PacedCpuWorker"


@dataclass(frozen=True)
class Bench:
    """What all processes of one target share."""

    models: ResolvedModels
    split: CoreSplit
    directory: Path
    """For sockets and logs; its path must be short, because a socket's path has at most 107 bytes."""
    gpus: int = 0
    longest: int = 0
    """Largest number of tokens of a request, prompt included."""
    most: int = 0
    """Largest number of requests in flight."""
    pace: Pace | None = None


class Processes:
    """Verifiers and drafters of one target.  Use as a context: leaving ends every process."""

    def __init__(self, bench: Bench) -> None:
        prepare_process()
        self.bench = bench
        self._children: list[Child] = []
        self._clients: list[EngineClient] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        close_all(self._children)

    def verifier(self, name: str, settings: Mapping[str, Any]) -> Child:
        """Starts a verifier, and does not wait.  `settings` override the defaults here."""
        cores = self.bench.split.verifier
        own = {"cores": len(cores)} | settings["verifier"]
        job = {"role": "verifier", "name": name, "cores": cores, "paths": self.bench.models}
        return self._child(job | {"settings": {**settings, "verifier": own}}, 0)

    def client(self, verifier: Child) -> EngineClient:
        """Waits until a verifier serves; returns a client of it."""
        client = EngineClient(verifier.wait_ready(), "bench", verifier.check)
        self._clients.append(client)
        return client

    def drafter(self, name: str, head_dir: str | None) -> tuple[Child, DrafterRef]:
        """Starts a drafter, and waits until it serves."""
        job = {
            "role": "drafter",
            "name": name,
            "cores": self.bench.split.drafter,
            "target_dir": self.bench.models.target_dir,
            "head_dir": head_dir,
            "learning_dir": self.bench.models.learning_dir,
            "settings": {"cores": len(self.bench.split.drafter)},
        }
        child = self._child(job, self.bench.gpus - 1)
        return child, DrafterRef(name, "bench", child.wait_ready(), "", 1)

    def _child(self, job: dict[str, Any], gpu: int) -> Child:
        job |= {
            "environment": {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.bench.gpus else {},
            "pace": self.bench.pace,
            "address": f"ipc://{self.bench.directory}/{len(self._children)}-{os.urandom(2).hex()}",
        }
        child = Child(job, self.bench.directory / f"{job['name']}.log")
        self._children.append(child)
        return child


def assign(verifier: Child, drafters: Sequence[DrafterRef]) -> None:
    """Makes these drafters, and no others, draft for a verifier from now on."""
    verifier.ask(list(drafters))


class TargetFleet:
    """The verifiers that measure one target, one per configuration, and their drafter."""

    def __init__(self, processes: Processes, configurations: Sequence[Configuration], say: Say) -> None:
        """Starts them and waits until they serve."""
        self._processes, self._say = processes, say
        self._verifiers: dict[Configuration, tuple[Child, EngineClient]] = {}
        self._drafter: Child | None = None
        refs: list[DrafterRef] = []
        if any(each.is_remote for each in configurations):
            self._drafter, ref = processes.drafter(DRAFTER_ID, processes.bench.models.drafter_dir)
            refs.append(ref)
        for at in range(0, len(configurations), LOADING_AT_ONCE):
            batch = configurations[at : at + LOADING_AT_ONCE]
            say(f"loading {', '.join(c.label for c in batch)}")
            settings = [verifier_settings(processes.bench, each, len(configurations)) for each in batch]
            loading = [processes.verifier(each.label, own) for each, own in zip(batch, settings, strict=True)]
            for configuration, child in zip(batch, loading, strict=True):
                self._verifiers[configuration] = child, processes.client(child)
                if configuration.is_remote:
                    assign(child, refs)

    def warm_up(
        self,
        configuration: Configuration,
        prompts: Sequence[list[int]],
        tokens: int,
        concurrencies: Sequence[int],
        loads: int,
        temperatures: Sequence[float] = (0.0,),
    ) -> None:
        """Runs every kind of load that will be measured `loads` times."""
        _, client = self._verifiers[configuration]
        before = client.fresh_stats()
        for concurrency, temperature in product(concurrencies, temperatures):
            for _ in range(loads):
                run_load(client, prompts[:concurrency], tokens, temperature, concurrency)
        if configuration.mode != "off" and not drafting_between(before, client.fresh_stats()).drafts:
            self._say(f"warning: {configuration.label} drafted nothing while warming up")

    def measure(
        self,
        configuration: Configuration,
        prompts: Sequence[list[int]],
        tokens: int,
        temperature: float,
        concurrency: int,
    ) -> tuple[MeasuredLoad, Snapshot, Snapshot]:
        """Runs a closed loop; returns the load and the counters before and after it."""
        before = self._read(configuration)
        load = run_load(self._verifiers[configuration][1], prompts, tokens, temperature, concurrency)
        return load, before, self._read(configuration)

    def _read(self, configuration: Configuration) -> Snapshot:
        verifier, client = self._verifiers[configuration]
        drafter = self._drafter if configuration.is_remote else None
        snapshot = Snapshot(client.fresh_stats(), client.stats_at, drafter.ask("stats") if drafter else None)
        if self._processes.bench.pace is None:
            return snapshot
        return replace(snapshot, steps=verifier.ask(PACED), passes=drafter.ask(PACED) if drafter else None)


def verifier_settings(bench: Bench, configuration: Configuration, verifiers: int) -> dict[str, Any]:
    """Values for `Settings`.  On a GPU, all verifiers are up at once and share its memory evenly."""
    engine_args: dict[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_USABLE / (verifiers + 1)} if bench.gpus else {}
    if bench.pace is not None:
        engine_args["worker_cls"] = PACED_WORKER
    if configuration.mode == PROBABILISTIC:
        engine_args["speculative_config"] = {"draft_sample_method": "probabilistic"}
    return {
        "mode": configuration.served,
        "num_speculative_tokens": configuration.k or 4,
        "verifier": {
            "max_num_seqs": max(64, bench.most),
            "max_model_len": bench.longest,
            "engine_args": engine_args,
        },
    }
