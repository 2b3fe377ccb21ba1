"""The gateway's own routing, as the simulator asks it.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from backend.routing import Ask, Candidate, LeastLoaded
from backend.simulator.fleet import Place, Route


def least_loaded() -> Route:
    """The gateway's default."""
    router = LeastLoaded()

    def route(tokens: int, places: Sequence[Place]) -> str | None:
        return router.choose(Ask(tokens), [Candidate(each.id, each.tokens, each.requests, each.routed) for each in places])

    return route
