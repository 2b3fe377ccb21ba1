"""Runs one scenario: starts a fleet, loads it, and computes the figures.  The parent process; Locust has one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loadtest import report, slo
from loadtest.figures import compare
from loadtest.options import Options
from loadtest.plan import ANSWERS, HEALTH, Plan, read_answers
from loadtest.served import ROOT, Gateway, OwnFleet
from loadtest.timing import Answer
from loadtest.watch import Watch, figures

Say = Callable[[str], None]
SETTLE_S = 15.0
GRACE_S = 30.0
"""Seconds beyond duration and drain after which a Locust that does not end is killed."""


class LoadError(RuntimeError):
    """Locust did not do its work."""


def run(options: Options, command: str, say: Say) -> report.Result:
    """Runs a scenario and writes its reports.  Raises `FleetError` or `LoadError`; everything started is ended in any case."""
    options.results.mkdir(parents=True, exist_ok=True)
    if options.kind.compares:
        result, answers = _compare(options, command, say)
    else:
        result, answers = _once(options, command, options.results, options.serve, say)
    result.slo = options.slo
    result.missed = slo.misses(options.slo, result.figures)
    report.write(result, answers, options.results)
    return result


def _compare(options: Options, command: str, say: Say) -> tuple[report.Result, list[Answer]]:
    """Runs the scenario in mode off, then with the given settings, and compares both."""
    base, before = _once(options, command, options.results / "off", (*options.serve, "--mode", "off"), say)
    report.write(base, before, options.results / "off")
    result, answers = _once(options, command, options.results, options.serve, say)
    try:
        result.figures.update(compare(before, answers))
    except ValueError as error:
        result.notes.append(str(error))
    add_trouble(result, base)
    result.notes.append(
        f"without speculation: TGS p50 {base.figures['tgs_p50'] or 0:.1f}, {base.figures['tokens_per_s'] or 0:.1f} tok/s"
    )
    return result, answers


def add_trouble(result: report.Result, base: report.Result) -> None:
    """Adds the failures of the first of two runs to the result, so that they count too."""
    for name in slo.COUNTS:
        result.figures[name] = (result.figures.get(name) or 0) + (base.figures.get(name) or 0)
    for reason, count in base.failures.items():
        result.failures[f"without speculation: {reason}"] = count


def _once(
    options: Options, command: str, directory: Path, serve: tuple[str, ...], say: Say
) -> tuple[report.Result, list[Answer]]:
    directory.mkdir(parents=True, exist_ok=True)
    notes: list[str] = []

    def tell(line: str) -> None:
        notes.append(line)
        say(line)

    with _target(options, directory, serve, say) as (gateway, fleet), ThreadPoolExecutor(1) as aside:
        watch = Watch(gateway)
        knobs = replace(options.knobs, model=options.knobs.model or gateway.model())
        plan = Plan(options.scenario, gateway.url, options.users, options.timeout_s, knobs, str(directory.resolve()))
        plan.write(directory / "plan.json")
        say(f"{options.scenario}: {options.users} users, {options.knobs.duration_s:g} s")
        watch.start()
        over = threading.Event()
        fault = None
        if options.kind.kills_drafter and fleet is not None:
            fault = aside.submit(_fault, options.knobs.duration_s / 3, gateway, fleet, over, tell)
        try:
            _locust(options, gateway.url, directory)
        finally:
            over.set()
            watch.stop()
        server = figures(watch.samples)
        if fleet is not None:
            server["leftover"] = watch.settle(SETTLE_S)
        watch.write(directory / "fleet.csv")
    answers = read_answers(directory / ANSWERS)
    health = json.loads((directory / HEALTH).read_text(encoding="utf-8"))
    result = report.evaluate(options.scenario, command, answers, server, health)
    result.notes = notes
    if fault is not None:
        fault.result()
    return result, answers


@contextmanager
def _target(options: Options, directory: Path, serve: tuple[str, ...], say: Say) -> Iterator[tuple[Gateway, OwnFleet | None]]:
    """The gateway to load, and its fleet if it is started here."""
    if options.host is not None:
        yield Gateway(options.host, options.api_key), None
        return
    say(f"starting outrider serve {' '.join(serve)}".rstrip())
    fleet = OwnFleet(serve, directory / "serve.log")
    try:
        yield Gateway(fleet.wait_ready(), options.api_key), fleet
    finally:
        fleet.stop()
        say("the fleet has ended")


def _locust(options: Options, host: str, directory: Path) -> None:
    """Runs Locust on the plan in `directory`.  Raises `LoadError` when Locust fails or does not end."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless", "--only-summary"]
    command += ["--host", host, "--load-plan", str(directory / "plan.json"), "--stop-timeout", f"{options.drain_s:g}"]
    command += ["--loglevel", "WARNING", "--html", str(directory / "report.html")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    if options.api_key:
        environment["OPENAI_API_KEY"] = options.api_key
    timeout_s = options.knobs.duration_s + options.drain_s + GRACE_S
    log = directory / "locust.log"
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise LoadError(f"Locust did not end; see {log}") from None
    if done.returncode != 0 or not (directory / HEALTH).is_file():
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["it said nothing"]
        raise LoadError(f"Locust failed: {last[0]} (see {log})")


def _fault(after_s: float, gateway: Gateway, fleet: OwnFleet, over: threading.Event, tell: Say) -> None:
    """Kills a drafter, and waits until another is ready in its place.  Raises `FleetError` if there is none to kill."""
    if over.wait(after_s):
        return
    before = set(gateway.drafters())
    tell(f"killed {fleet.kill_a_drafter(gateway)}")
    killed = time.monotonic()
    while not set(gateway.drafters()) - before:
        if over.wait(0.5):
            tell("no drafter had taken its place when the load ended")
            return
    tell(f"another drafter was ready {time.monotonic() - killed:.1f} s later")
