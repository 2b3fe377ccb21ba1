"""Commands that have options of their own and end by themselves.  The command line's process.

What they do is elsewhere; here their errors become exit codes.  The heavy imports are inside.
"""

from __future__ import annotations

import runpy
import sys

from gateway import present
from gateway.exits import FAILED, OK, configure_logging, fail
from gateway.signals import signals


def records(arguments: list[str]) -> int:
    """Reads records; the command has its own options."""
    from backend.records.main import main
    from backend.records.reading import RecordsError

    try:
        main(arguments, print, lambda line: print(f"outrider: {line}", file=sys.stderr))
    except RecordsError as error:
        return fail(str(error), FAILED)
    return OK


def report(arguments: list[str]) -> int:
    """Draws records or a rollout; the command has its own options."""
    from backend.records.reading import RecordsError
    from backend.records.report import main

    try:
        main(arguments, present.Progress().say)
    except RecordsError as error:
        return fail(str(error), FAILED)
    return OK


def bench(arguments: list[str]) -> int:
    """Measures every mode; the benchmark has its own options."""
    from backend.bench.main import BenchError, main

    with signals() as forced:
        try:
            main(arguments, present.Progress().say)
        except BenchError as error:
            return fail(str(error), FAILED)
        finally:
            forced.armed = True
    return OK


def simulate(arguments: list[str]) -> int:
    """Simulates a fleet; the simulator has its own options."""
    from gateway.simulated_routing import simulate

    simulate(arguments, print)
    return OK


def rollout(arguments: list[str]) -> int:
    """Runs a trace over a fleet of its own; a rollout has its own options beside the settings."""
    from backend.rollout.main import CommandError
    from backend.rollout.main import rollout as run

    configure_logging("warning")
    with signals() as forced:
        try:
            run(arguments, present.Progress().say)
        except CommandError as error:
            return fail(str(error), FAILED)
        finally:
            forced.armed = True
    return OK


def trace(arguments: list[str]) -> int:
    """Makes traces; the command has its own options."""
    from backend.rollout.main import trace as run

    run(arguments, print)
    return OK


def train_demo(arguments: list[str]) -> int:
    """Trains the built-in models; the demo package has its own options."""
    before = sys.argv
    sys.argv = ["outrider train-demo", *arguments]
    try:
        runpy.run_module("backend.demo", run_name="__main__")
    finally:
        sys.argv = before
    return OK
