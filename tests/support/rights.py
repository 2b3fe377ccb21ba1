"""The routes by the right that they ask for.  Tests only."""

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gateway.auth.rights import Right, right_of


def paths(routes: Iterable[BaseRoute], *rights: Right) -> frozenset[str]:
    """The paths of the routes that ask for one of these rights."""
    return frozenset(route.path for route in routes if right_of(route) in rights and isinstance(route, APIRoute))
