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
    """The right that each path asks for.  Paths that are not listed ask for `Right.KEY`.

    `Access` compares whole paths, without the method.  Raises `TypeError` if routes of one path ask for different rights, or
    if a path with parameters asks for another right than `Right.KEY`.
    """
    found: dict[str, Right] = {}
    for route in routes:
        if isinstance(route, APIRoute):
            right = (route.openapi_extra or {}).get("right", Right.KEY)
            if found.setdefault(route.path, right) is not right:
                raise TypeError(f"routes of {route.path} ask for different rights")
            if "{" in route.path and right is not Right.KEY:
                raise TypeError(f"{route.path} has parameters: only {Right.KEY} can be asked for it")
    return found
