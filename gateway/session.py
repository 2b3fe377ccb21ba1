"""Which session a request belongs to, from the route to the place that routes it.  The gateway's event loop.

Between the two lies vLLM's own pipeline, which would not carry it.  A context variable does: each request runs in tasks of its
own, and those that it starts inherit its context.
"""

from __future__ import annotations

from contextvars import ContextVar

LONGEST = 256
"""Characters of a session's name that count."""

_session: ContextVar[str | None] = ContextVar("session", default=None)


def enter_session(name: str | None) -> None:
    """What this task submits from now on belongs to session `name`."""
    _session.set(name[:LONGEST] if name else None)


def current_session() -> str | None:
    """The session of the request at hand."""
    return _session.get()
