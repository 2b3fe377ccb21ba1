"""Who sends a request, and what that allows.  Pure data, in any thread.

`gateway.access` puts a `Caller` at `scope["state"]["caller"]` of every HTTP request; `caller_of` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from starlette.requests import HTTPConnection


class Priority(IntEnum):
    """Who is served first where requests have to wait: a lower number."""

    HIGH = 0
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What a key may use; None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Caller:
    """One who may call.  What is kept for a caller belongs to its `owner`, whatever key it uses by then."""

    name: str
    """Appears in logs; empty where no key is needed."""
    owner: str = ""
    """Empty where there is one key for everybody, or none."""
    models: frozenset[str] | None = None
    """Model and adapter names it may use; None: all."""
    limits: Limits = UNLIMITED
    weight: float = 1.0
    """Its share of the fleet where keys compete, relative to theirs."""
    priority: Priority = Priority.INTERACTIVE
    admin: bool = False
    metrics: bool = False
    learn: bool = True
    """Whether drafters may learn from its requests."""

    def may_use(self, model: str) -> bool:
        """Whether this model or adapter is among its own."""
        return self.models is None or model in self.models


ANYBODY = Caller("")
"""Who calls where no key is needed."""


def caller_of(request: HTTPConnection) -> Caller:
    """Who sent this request."""
    state: dict[str, Any] = request.scope.get("state") or {}
    caller: Caller = state.get("caller", ANYBODY)
    return caller
