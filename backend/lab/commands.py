"""The laboratory's commands, found by entry point (`outrider.commands` in `pyproject.toml`).  The command line's process.

Each command takes its arguments and `say`, which prints a line with the time.  It raises `ConfigError` for faults in the input
and `CommandError` for later failures.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.config.sources import ConfigError

Say = Callable[[str], None]


def bench(arguments: list[str], say: Say) -> None:
    """Measures every mode on this machine."""
    from backend.lab.bench.main import main

    main(arguments, say)


def simulate(arguments: list[str], say: Say) -> None:
    """Simulates a large fleet under the coordinator's policy."""
    from backend.lab.simulator.arrivals import TraceError
    from backend.lab.simulator.main import main

    try:
        main(arguments, say)
    except (TraceError, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def train_demo(arguments: list[str], say: Say) -> None:
    """Trains the built-in models."""
    from backend.lab.demo.__main__ import main

    main(arguments)
