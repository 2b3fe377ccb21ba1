"""The gateway's routing for the simulator, which as a part of the backend knows nothing of the gateway.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from gateway.routing import Candidate, LeastLoaded

if TYPE_CHECKING:
    from backend.simulator.fleet import Place, Route


def make_route() -> Route:
    """A router with nothing routed yet."""
    router = LeastLoaded()

    def route(tokens: int, places: Sequence[Place]) -> str | None:
        # A place has all that a candidate has; making thousands of candidates for every request would take most of the time.
        return router.choose(tokens, cast("Sequence[Candidate]", places))

    return route
