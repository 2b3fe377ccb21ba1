"""The laboratory's commands, found by entry point (`outrider.commands` in `pyproject.toml`).  The command line's process.

Each takes its own arguments and `say`, which prints a line with the time.  It raises `ConfigError` for what is wrong with the
input and `CommandError` for what goes wrong later.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from backend.config.sources import ConfigError
from backend.routing.routers import Ask, Candidate, LeastLoaded

if TYPE_CHECKING:
    from backend.lab.simulator.simulation import Candidate as SimulatedCandidate
    from backend.lab.simulator.simulation import Route

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
        main(arguments, say, least_loaded)
    except (TraceError, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def train_demo(arguments: list[str], say: Say) -> None:
    """Trains the built-in models."""
    before = sys.argv
    sys.argv = ["outrider train-demo", *arguments]
    try:
        runpy.run_module("backend.lab.demo", run_name="__main__")
    finally:
        sys.argv = before


def least_loaded() -> Route:
    """Routing as a gateway does it unless told otherwise, with nothing routed yet."""
    router = LeastLoaded()

    def route(tokens: int, candidates: Sequence[SimulatedCandidate]) -> str | None:
        # They have all that routing looks at; making thousands of its own for every request would take most of the time.
        return router.choose(Ask(tokens), cast("Sequence[Candidate]", candidates))

    return route
