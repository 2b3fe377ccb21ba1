"""The caller of a request, with its rights and limits.  Pure data, in any thread.

`gateway.auth.access` puts a `Caller` at `scope["state"]["caller"]` of every HTTP request; `caller_of` reads it.
"""

from dataclasses import dataclass
from enum import IntEnum

from starlette.requests import HTTPConnection


class Priority(IntEnum):
    """Where requests wait, lower numbers are served first."""

    HIGH = 0
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller.  Stored responses, files and batches belong to its `owner`, not to the key that was used.

    A limit that is None does not hold.
    """

    name: str
    """Name for logs; empty where no key is needed."""
    owner: str = ""
    """The key's name in the keys file; empty for the settings' keys, or without keys."""
    models: frozenset[str] | None = None
    """Model and adapter names it may use; None: all."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    weight: float = 1.0
    """Its share of the fleet where keys compete, relative to other keys' weights."""
    priority: Priority = Priority.INTERACTIVE
    admin: bool = False
    metrics: bool = False
    learn: bool = True
    """Whether drafters may learn from its requests, and these share look-ups."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


ANYBODY = Caller("")
"""The caller where no key is needed."""


def caller_of(request: HTTPConnection) -> Caller:
    caller: Caller = request.state.caller
    return caller
