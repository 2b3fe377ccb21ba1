"""Starts a benchmark's verifiers and drafters, and measures one target with a fleet of them.  Parent process.

That fleet has one verifier per configuration, and one drafter for all.  They stay up, idle, while other configurations are
measured; an idle verifier wakes four times a second to publish its counters.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self

from backend.config.sources import Say
from backend.engine.client import EngineClient
from backend.fleet import DrafterRef
from backend.lab.bench.children import Child, Served, build_drafter, build_verifier
from backend.lab.bench.load import MeasuredLoad, run_load
from backend.lab.bench.measure import Snapshot, drafting_between
from backend.lab.bench.options import PROBABILISTIC
from backend.lab.bench.pace import Pace
from backend.lab.bench.plan import Configuration, CoreSplit
from backend.launch.fleet import prepare_process
from backend.models.resolve import ResolvedModels

GPU_MEMORY_USABLE = 0.85
DRAFTER_ID = "drafter-0"
PACED_WORKER = "backend.lab.bench.paced_worker.PacedCpuWorker"


@dataclass
class Processes:
    """Verifiers and drafters of one target.  Use as a context: leaving ends every process."""

    models: ResolvedModels
    split: CoreSplit
    directory: Path
    """For sockets and logs; its path must be short, because a socket's path has at most 107 bytes."""
    gpus: int = 0
    pace: Pace | None = None
    _ending: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        prepare_process()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def verifier(self, name: str, settings: Mapping[str, Any]) -> tuple[Child, EngineClient]:
        """Starts a verifier, and a client of it.  `settings` override the defaults here."""
        cores = self.split.verifier
        whole = {**settings, "verifier": {"cores": len(cores), **settings["verifier"]}}
        child = self._start_child(name, partial(build_verifier, name, whole, self.models, self.pace), cores, 0)
        client = EngineClient(child.address, "bench", child.check)
        self._ending.callback(client.close)
        return child, client

    def drafter(self, name: str, head_dir: str | None) -> tuple[Child, DrafterRef]:
        """Starts a drafter."""
        cores = self.split.drafter
        build = partial(build_drafter, name, len(cores), self.models, head_dir, self.pace)
        child = self._start_child(name, build, cores, self.gpus - 1)
        return child, DrafterRef(name, "bench", child.address, "", 1)

    def _start_child(self, name: str, build: Callable[[str], Served], cores: Sequence[int], gpu: int) -> Child:
        address = f"ipc://{self.directory}/{os.urandom(4).hex()}"
        variables = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.gpus else {}
        child = Child(name, partial(build, address), cores, self.directory / f"{name}.log", variables)
        self._ending.callback(child.close)
        return child


class TargetFleet:
    """The verifiers that measure one target, one per configuration, and their drafter."""

    def __init__(
        self, processes: Processes, configurations: Sequence[Configuration], longest: int, most: int, say: Say
    ) -> None:
        """Starts them, one after the other.

        `longest`: largest number of tokens of a request, prompt included; `most`: largest number of requests in flight.
        """
        self._say = say
        self._verifiers: dict[Configuration, tuple[Child, EngineClient]] = {}
        self._drafter: Child | None = None
        refs: list[DrafterRef] = []
        if any(each.is_remote for each in configurations):
            self._drafter, ref = processes.drafter(DRAFTER_ID, processes.models.drafter_dir)
            refs.append(ref)
        shared: dict[str, Any] = {"max_model_len": longest}
        if processes.gpus:
            # All verifiers are up at once and share a GPU's memory evenly.
            shared["gpu_memory_utilization"] = GPU_MEMORY_USABLE / (len(configurations) + 1)
        for each in configurations:
            say(f"loading {each.label}")
            own = {"max_num_seqs": max(64, most), "engine_args": shared | engine_args(each, processes.pace)}
            settings = {"mode": each.served, "num_speculative_tokens": each.k or 4, "verifier": own}
            self._verifiers[each] = child, _ = processes.verifier(each.label, settings)
            if each.is_remote:
                child.ask(refs)

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
        self, configuration: Configuration, prompts: Sequence[list[int]], tokens: int, temperature: float, concurrency: int
    ) -> tuple[MeasuredLoad, Snapshot, Snapshot]:
        """Runs a closed loop; returns the load and the counters before and after it."""
        before = self._read(configuration)
        load = run_load(self._verifiers[configuration][1], prompts, tokens, temperature, concurrency)
        return load, before, self._read(configuration)

    def _read(self, configuration: Configuration) -> Snapshot:
        verifier, client = self._verifiers[configuration]
        stats = client.fresh_stats()
        drafter, passes = self._drafter.ask() if self._drafter and configuration.is_remote else (None, None)
        return Snapshot(stats, drafter, verifier.ask(), passes)


def engine_args(configuration: Configuration, pace: Pace | None) -> dict[str, Any]:
    """vLLM's arguments that set a configuration and a paced run apart."""
    found: dict[str, Any] = {} if pace is None else {"worker_cls": PACED_WORKER}
    if configuration.mode == PROBABILISTIC:
        found["speculative_config"] = {"draft_sample_method": "probabilistic"}
    return found
