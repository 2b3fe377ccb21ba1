"""`python -m tests.gateway_cost [--rounds N] [--streams 16,64] ...`: prints a table, writes JSON.  Parent process."""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.gateway_cost import load, servers
from tests.gateway_cost.engine import PacedVerifier
from tests.support.fleet_process import free_port, wait_for
from tests.support.processes import Child, demo_models

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
    with tempfile.TemporaryDirectory(prefix="orgc") as name:
        figures = uvloop.run(_measure(Path(name), options))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures) if options.idle else table(figures))
    return 0


async def _measure(folder: Path, options: argparse.Namespace) -> Figures:
    cores = sorted(os.sched_getaffinity(0))
    mains = {"gateway": servers.gateway} if options.idle else {"gateway": servers.gateway, "vllm": servers.vllm_server}
    fronts: dict[str, load.Server] = {}
    with ExitStack() as stack:
        for name, main_ in mains.items():
            verifier = PacedVerifier(folder, name, 3600.0 if options.idle else options.interval_ms / 1e3).start()
            stack.callback(verifier.close)
            job = {"model": demo_models().target_dir, "member": verifier.member, "port": free_port()}
            child = await asyncio.to_thread(Child, main_, job, folder)
            stack.callback(child.close)
            _pin(child.pid, {cores[0]})
            await asyncio.to_thread(wait_for, partial(_answers, child.address), 120, f"{name} to answer")
            fronts[name] = load.Server(child.address, child.pid, verifier)
        _pin(os.getpid(), set(cores[1:]) or {cores[0]})
        # A garbage collection over all that was imported would hold clients and verifiers for a fifth of a second.
        gc.freeze()
        stack.callback(gc.unfreeze)
        return await _rounds(options, fronts)


async def _rounds(options: argparse.Namespace, fronts: dict[str, load.Server]) -> Figures:
    figures: Figures = {}

    async def ask(what: str, measure: Callable[..., Any], **arguments: Any) -> None:
        for name in order:
            found = await measure(fronts[name], seconds=options.seconds, **arguments)
            figures.setdefault(what, {}).setdefault(name, []).append(found)

    order = list(fronts)
    if options.idle:
        await ask(f"{options.idle} idle streams", load.idle, count=options.idle)
        return figures
    for _ in range(options.rounds):
        for count in map(int, options.streams.split(",")):
            await ask(f"chunk, {count} streams", load.streams, count=count)
            await ask(f"one-token answer, {count} connections", load.requests, count=count, stream=False)
            await ask(f"one-token stream, {count} connections", load.requests, count=count, stream=True)
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


def _pin(pid: int, cores: set[int]) -> None:
    """Has each of a process's threads run on these cores only."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    sys.exit(main())
