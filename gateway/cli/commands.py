"""Commands that have options of their own and end by themselves.  The command line's process.

Each only calls its implementation, after a late import, for imports are heavy.  They raise `ConfigError` and `CommandError`.
"""

from __future__ import annotations

import importlib.metadata
import sys

from backend.config.logs import configure_logging
from gateway.cli import console
from gateway.cli.signals import FAILED, OK, signals


def records(arguments: list[str]) -> int:
    """Summarises, draws and converts records."""
    from backend.records.main import main

    main(arguments, print, lambda line: print(f"outrider: {line}", file=sys.stderr))
    return OK


def rollout(arguments: list[str]) -> int:
    """Runs a trace over a fleet of its own."""
    from gateway.rollout.main import rollout as run

    configure_logging("warning")
    with signals():
        run(arguments, console.Progress().say)
    return OK


def run_batch(arguments: list[str]) -> int:
    """Carries out a file of requests over HTTP."""
    from gateway.cli.run_batch import main

    configure_logging("warning")
    with signals():
        failed = main(arguments, console.Progress().say)
    return FAILED if failed else OK


def train_drafter(arguments: list[str]) -> int:
    """Trains a head for a model."""
    from gateway.cli.train_drafter import main

    with signals():
        main(arguments, console.Progress().say)
    return OK


def trace(arguments: list[str]) -> int:
    """Makes traces."""
    from gateway.rollout.main import trace as run

    run(arguments, print)
    return OK


def laboratory(name: str, arguments: list[str]) -> int:
    """Runs a command that only measures or trains.  It is found by its entry point; no serving code imports it."""
    (point,) = importlib.metadata.entry_points(group="outrider.commands", name=name)
    with signals():
        point.load()(arguments, console.Progress().say)
    return OK
