"""The simulator with the routing that a gateway uses by default.  The command's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from backend.config.sources import ConfigError
from backend.routing import Ask, Candidate, LeastLoaded

if TYPE_CHECKING:
    from backend.simulator.fleet import Place, Route


def simulate(arguments: Sequence[str], say: Callable[[str], None]) -> None:
    """Runs the simulator.  Raises `ConfigError` where the arguments or the trace make no sense."""
    from backend.simulator.main import main
    from backend.simulator.traces import TraceError

    try:
        main(arguments, say, make_route)
    except (TraceError, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def make_route() -> Route:
    """A router with nothing routed yet."""
    router = LeastLoaded()

    def route(tokens: int, places: Sequence[Place]) -> str | None:
        # A place has all that a candidate has; making thousands of candidates for every request would take most of the time.
        return router.choose(Ask(tokens), cast("Sequence[Candidate]", places))

    return route
