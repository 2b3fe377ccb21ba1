"""Who may call a route.  `gateway.http.openapi.described` takes it at each route; `gateway.auth.access` asks for it."""

from enum import Enum

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


class Right(Enum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    """No key.  Probes have none; the pages and the API's document contain nothing about the fleet."""
    METRICS = "metrics"
    """No key, until some key has the right to read the metrics; then such a key."""
    KEY = "key"
    """Any key."""
    GENERATE = "generate"
    """Any key.  A `POST` gets a claim and counts against `max_in_flight`."""
    ADMINISTER = "administer"
    """An administrator: the route changes the fleet."""


def right_of(route: BaseRoute) -> Right:
    """What a route asks for.  Raises `TypeError` if it does not say: no such route is served."""
    right = (route.openapi_extra or {}).get("right") if isinstance(route, APIRoute) else None
    if not isinstance(right, Right):
        raise TypeError(f"{route} does not say who may call it")
    return right
