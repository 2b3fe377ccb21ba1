"""Who may call a route.  `gateway.openapi.described` takes it at each route; `gateway.access` asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


class Right(Enum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    """No key.  Probes and scrapers have none; the pages and the API's document contain nothing about the fleet."""
    KEY = "key"
    """Any key."""
    GENERATE = "generate"
    """Any key.  A `POST` gets a claim and counts against `max_in_flight`."""
    ADMINISTER = "administer"
    """An administrator: the route changes the fleet."""


def rights(routes: Iterable[BaseRoute]) -> dict[str, Right]:
    """The right that each path asks for.  `Right.KEY` is left out, because paths that are not listed ask for it.

    Raises `TypeError` if a path with parameters asks for another right, since `Access` compares whole paths.
    """
    found: dict[str, Right] = {}
    for route in routes:
        right = (route.openapi_extra or {}).get("right", Right.KEY) if isinstance(route, APIRoute) else Right.KEY
        if isinstance(route, APIRoute) and right is not Right.KEY:
            if "{" in route.path:
                raise TypeError(f"{route.path} has parameters: only {Right.KEY} can be asked for it")
            found[route.path] = right
    return found
