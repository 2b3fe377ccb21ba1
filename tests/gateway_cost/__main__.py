"""`python -m tests.gateway_cost [--rounds N] [--streams 16,64] ...`: prints a table, writes JSON.  Parent process."""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.gateway_cost import engine, load, servers
from tests.support.fleet_process import free_port, wait_for
from tests.support.processes import Child, Main, demo_models

Figures = dict[str, dict[str, list[dict[str, float]]]]
"""By what was measured, then by server: one entry per round."""


def main() -> int:
    """Measures and says."""
    parser = argparse.ArgumentParser(prog="python -m tests.gateway_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default: 3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement (default: 6)")
    parser.add_argument("--streams", default="16,64", help="streams, or connections, at a time (default: 16,64)")
    parser.add_argument("--interval-ms", type=float, default=50.0, help="between two tokens of a stream (default: 50)")
    parser.add_argument("--idle", type=int, metavar="N", help="only hold N streams of this gateway on which nothing comes")
    parser.add_argument("--output", type=Path, help="write every figure there, as JSON")
    options = parser.parse_args()
    if options.idle:
        options.interval_ms = 3.6e6
    counts = [int(each) for each in options.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="orgc") as name:
        figures = _measure(Path(name), options, counts)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures) if options.idle else table(figures))
    return 0


def _measure(folder: Path, options: argparse.Namespace, counts: list[int]) -> Figures:
    model = demo_models().target_dir
    cores = sorted(os.sched_getaffinity(0))
    front, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    emissions = engine.Emissions.create(folder / "emissions")
    children: dict[str, Child] = {}
    mains = {"gateway": servers.gateway} if options.idle else {"gateway": servers.gateway, "vllm": servers.vllm_server}
    with ExitStack() as stack:

        def start(where: set[int], main_: Main, job: dict[str, Any]) -> Child:
            return _on(where, stack.enter_context(Child(main_, job, folder)))

        for name, main_ in mains.items():
            address = f"ipc://{folder}/{name}.sock"
            job = {"model": model, "address": address, "emissions": emissions}
            job |= {"interval_s": options.interval_ms / 1e3, "context": 4096}
            start(others, engine.main, job)
            children[name] = start(front, main_, {"model": model, "engine": address, "port": free_port()})
            wait_for(partial(_answers, children[name].address), 120, f"{name} to answer")
        client = start(others, load.main, {"model": model, "emissions": emissions})
        return _rounds(options, counts, children, client)


def _rounds(options: argparse.Namespace, counts: list[int], servers_: dict[str, Child], client: Child) -> Figures:
    figures: Figures = {}

    def ask(what: str, method: str, **arguments: Any) -> None:
        for name in order:
            server = servers_[name]
            client.tell((method, {"url": server.address, "pid": server.pid, "seconds": options.seconds, **arguments}))
            found = client.hear()
            if isinstance(found, Exception):
                raise found
            figures.setdefault(what, {}).setdefault(name, []).append(found)

    order = list(servers_)
    if options.idle:
        ask(f"{options.idle} idle streams", "idle", count=options.idle)
        return figures
    for _ in range(options.rounds):
        for count in counts:
            ask(f"chunk, {count} streams", "streams", count=count)
            ask(f"one-token answer, {count} connections", "requests", count=count, stream=False)
            ask(f"one-token stream, {count} connections", "requests", count=count, stream=True)
        order = order[::-1]
    return figures


def table(figures: Figures) -> str:
    """Medians over rounds, and the smallest and largest CPU time."""
    rows = [
        "| CPU of the front process per | server | us | us, least to most | per second | share of a core | p50 ms | p99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for what, by_server in figures.items():
        for name, rounds in by_server.items():
            middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            costs = [each["us"] for each in rounds]
            rows.append(
                f"| {what} | {name} | {middle['us']:.0f} | {min(costs):.0f} to {max(costs):.0f} | {middle['per_s']:.0f} "
                f"| {middle['core']:.0%} | {middle['p50_ms']:.2f} | {middle['p99_ms']:.2f} |"
            )
    return "\n".join(rows)


def _on(cores: set[int], child: Child) -> Child:
    """The child's threads, each on these cores only."""
    for thread in os.listdir(f"/proc/{child.pid}/task"):
        os.sched_setaffinity(int(thread), cores)
    return child


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    sys.exit(main())
