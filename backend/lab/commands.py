"""The laboratory's commands, found by entry point (`outrider.commands` in `pyproject.toml`).  The command line's process.

Each command takes its arguments and `say`, which prints a line with the time.  It raises `ConfigError` for faults in the input
and `CommandError` for later failures.
"""

from collections.abc import Callable

Say = Callable[[str], None]


def bench(arguments: list[str], say: Say) -> None:
    """Measures every mode on this machine."""
    from backend.lab.bench.main import main

    main(arguments, say)


def train_demo(arguments: list[str], say: Say) -> None:
    """Trains the built-in models."""
    from backend.lab.demo.__main__ import main

    main(arguments)


def selfcheck(arguments: list[str], say: Say) -> None:
    """Checks and times a drafter on this machine's GPU."""
    from backend.lab.selfcheck import main

    main(arguments, say)
