"""Commands that have options of their own and end by themselves.  The command line's process.

What they do is elsewhere; here their errors become exit codes.  The heavy imports are inside.
"""

from __future__ import annotations

import importlib.metadata
import sys

from backend.config.sources import CommandError
from gateway import present
from gateway.exits import FAILED, OK, configure_logging, fail
from gateway.signals import signals

LABORATORY = ("bench", "simulate", "train-demo")
"""Commands that only measure or make; nothing that serves imports them."""


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


def rollout(arguments: list[str]) -> int:
    """Runs a trace over a fleet of its own; a rollout has its own options beside the settings."""
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


def run_batch(arguments: list[str]) -> int:
    """Carries out a file of requests over HTTP; the command has its own options beside the settings."""
    from gateway.run_batch import main

    configure_logging("warning")
    with signals() as forced:
        try:
            failed = main(arguments, present.Progress().say)
        except CommandError as error:
            return fail(str(error), FAILED)
        finally:
            forced.armed = True
    return FAILED if failed else OK


def train_drafter(arguments: list[str]) -> int:
    """Trains a head for a model; the command has its own options beside the settings."""
    from gateway.train_drafter import main

    with signals() as forced:
        try:
            main(arguments, present.Progress().say)
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


def laboratory(name: str, arguments: list[str]) -> int:
    """One of the commands that an entry point names (`LABORATORY`); it has its own options."""
    (point,) = importlib.metadata.entry_points(group="outrider.commands", name=name)
    with signals() as forced:
        try:
            point.load()(arguments, present.Progress().say)
        except CommandError as error:
            return fail(str(error), FAILED)
        finally:
            forced.armed = True
    return OK
