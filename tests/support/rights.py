"""The routes by the right that they ask for.  Tests only."""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

import gateway.routes
from gateway.auth.rights import Right, right_of

MODULES = [importlib.import_module(f"gateway.routes.{each.name}") for each in pkgutil.iter_modules(gateway.routes.__path__)]
ROUTES: list[Any] = [route for module in MODULES if hasattr(module, "router") for route in module.router.routes]


def paths(routes: Iterable[BaseRoute], *rights: Right) -> frozenset[str]:
    """The paths of the routes that ask for one of these rights."""
    return frozenset(route.path for route in routes if right_of(route) in rights and isinstance(route, APIRoute))
