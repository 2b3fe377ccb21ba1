"""One run: a fleet, the load, the figures.  The parent process; Locust has one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loadtest import report, slo
from loadtest.figures import compare
from loadtest.options import Options
from loadtest.plan import ANSWERS, HEALTH, Plan, read_answers
from loadtest.served import ROOT, FleetError, Gateway, OwnFleet
from loadtest.timing import Answer
from loadtest.watch import Watch, figures

Say = Callable[[str], None]
SETTLE_S = 15.0
GRACE_S = 30.0
"""On top of duration and drain, before a Locust that does not end is ended."""


class LoadError(RuntimeError):
    """The load could not be made; the message is for a person."""


def run(options: Options, command: str, say: Say) -> report.Result:
    """Everything, reports included.  Raises `FleetError` or `LoadError`; what was started has ended then, too."""
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
    """Mode off first, then as asked."""
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
    """What went wrong in the first of two runs counts as well."""
    for name in slo.COUNTS:
        result.figures[name] = (result.figures.get(name) or 0) + (base.figures.get(name) or 0)
    for reason, count in base.reasons.items():
        result.reasons[f"without speculation: {reason}"] = count


def _once(
    options: Options, command: str, directory: Path, serve: tuple[str, ...], say: Say
) -> tuple[report.Result, list[Answer]]:
    directory.mkdir(parents=True, exist_ok=True)
    with _target(options, directory, serve, say) as (gateway, fleet):
        watch = Watch(gateway)
        knobs = replace(options.knobs, model=options.knobs.model or gateway.model())
        plan = Plan(options.scenario, gateway.url, options.users, options.timeout_s, knobs, str(directory.resolve()))
        plan.write(directory / "plan.json")
        say(f"{options.scenario}: {options.users} users, {options.knobs.duration_s:g} s")
        watch.start()
        notes: list[str] = []
        fault = _Fault(options, gateway, fleet, notes, say)
        try:
            _locust(options, gateway.url, directory, fault.begin)
        finally:
            fault.end()
            watch.stop()
        server = figures(watch.samples)
        if fleet is not None:
            server["leftover"] = watch.settle(SETTLE_S)
        watch.write(directory / "fleet.csv")
    answers = read_answers(directory / ANSWERS)
    health = json.loads((directory / HEALTH).read_text(encoding="utf-8"))
    result = report.evaluate(options.scenario, command, answers, server, health)
    result.notes = notes
    if fault.failed:
        raise LoadError(fault.failed)
    return result, answers


@contextmanager
def _target(options: Options, directory: Path, serve: tuple[str, ...], say: Say) -> Iterator[tuple[Gateway, OwnFleet | None]]:
    """The gateway to load, and the fleet behind it when it is ours."""
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


def _locust(options: Options, host: str, directory: Path, on_begin: Callable[[], None]) -> None:
    """Runs Locust on the plan in `directory`.  Raises `LoadError` when it does not do its work."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless", "--only-summary"]
    command += [
        "--host",
        host,
        "--load-plan",
        str(directory / "plan.json"),
        "--stop-timeout",
        f"{options.drain_s:g}",
        "--loglevel",
        "WARNING",
    ]
    command += ["--html", str(directory / "report.html")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    if options.api_key:
        environment["OPENAI_API_KEY"] = options.api_key
    log = directory / "locust.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        on_begin()
        try:
            process.wait(options.knobs.duration_s + options.drain_s + GRACE_S)
        except subprocess.TimeoutExpired:
            raise LoadError(f"Locust did not end; see {log}") from None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if process.returncode != 0 or not (directory / HEALTH).is_file():
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["it said nothing"]
        raise LoadError(f"Locust failed: {last[0]} (see {log})")


class _Fault:
    """Kills a drafter of our fleet after a third of the time, where the scenario says so, and sees another take its place."""

    def __init__(self, options: Options, gateway: Gateway, fleet: OwnFleet | None, notes: list[str], say: Say) -> None:
        self.failed = ""
        self._options = options
        self._gateway = gateway
        self._fleet = fleet
        self._notes = notes
        self._say = say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fault", daemon=True)

    def begin(self) -> None:
        if self._options.kind.kills_drafter:
            self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        assert self._fleet is not None
        if self._over.wait(self._options.knobs.duration_s / 3):
            return
        try:
            before = set(self._gateway.drafters())
            self._tell(f"killed {self._fleet.kill_a_drafter(self._gateway)}")
            killed = time.monotonic()
            while not set(self._gateway.drafters()) - before:
                if self._over.wait(0.5):
                    self._tell("no drafter had taken its place when the load ended")
                    return
            self._tell(f"another drafter was ready {time.monotonic() - killed:.1f} s later")
        except FleetError as error:
            self.failed = str(error)

    def _tell(self, line: str) -> None:
        self._notes.append(line)
        self._say(line)
