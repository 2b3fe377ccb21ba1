"""Decides which verifier a request goes to.  Pure: candidates in, an id out; no clock, no socket.

Runs in the gateway's event loop, once per sequence.  Every policy is a `Router`.  `WithAffinity` wraps another router, and
prefers the verifier that has seen a session, or the beginning of a prompt, before.  `make_router` builds the router that the
settings ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from backend.config.settings import Affinity, GatewaySettings
from backend.routing.affinity import PrefixMap, RecentMap

SLACK = 8
"""A verifier is preferred only while it has at most 8 requests more than the least loaded one."""
ENTRIES = 65536
"""Most sessions, and most prompt blocks of 16 tokens, that are remembered."""


class RoutingCandidate(msgspec.Struct, frozen=True, gc=False):
    """A verifier that may be given work, as this gateway sees it."""

    id: str
    tokens: int
    """Tokens of this gateway's requests there: prompts and emitted tokens."""
    requests: int
    """This gateway's requests there."""
    routed: int
    """Requests this gateway has ever sent there."""
    others: int = 0
    """Requests of other gateways there, by its latest report."""

    @property
    def load(self) -> int:
        """All requests there, as far as known."""
        return self.requests + self.others


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """What routing may know of a request."""

    prompt: Sequence[int] = ()
    scope: str = ""
    """Adapter and cache salt: cached prefixes are shared only between requests of one scope."""
    session: str | None = None


class Router(Protocol):
    """Chooses among the verifiers that take requests."""

    def choose(self, ask: RoutingRequest, candidates: Sequence[RoutingCandidate]) -> str | None:
        """The id of one of `candidates`, or None when there is none."""
        ...

    def forget(self, verifier_ids: Collection[str]) -> None:
        """The verifiers have lost their caches.  Routers that remember no caches do nothing."""
        return


class LeastLoaded(Router):
    """Chooses the verifier with the fewest tokens of this gateway in flight; then the fewest requests; then the least used."""

    def choose(self, ask: RoutingRequest, candidates: Sequence[RoutingCandidate]) -> str | None:
        if not candidates:
            return None
        return min(candidates, key=lambda each: (each.tokens, each.requests, each.routed, each.id)).id


class WithAffinity(Router):
    """Sends a session, or a prompt with a known beginning, where it went before.  `base` chooses for all other requests.

    A verifier is preferred only while it has at most `slack` requests more than the least loaded one: a popular prefix must
    not fill one verifier while others idle.  At most `entries` sessions and blocks are remembered, the most recently used.
    """

    def __init__(self, base: Router, affinity: Affinity, slack: int = SLACK, entries: int = ENTRIES) -> None:
        self._base = base
        self._slack = slack
        self._sessions = RecentMap[str](entries) if affinity in ("session", "both") else None
        self._prefixes = PrefixMap(entries) if affinity in ("prefix", "both") else None

    def choose(self, ask: RoutingRequest, candidates: Sequence[RoutingCandidate]) -> str | None:
        chosen = self._preferred(ask, candidates) or self._base.choose(ask, candidates)
        if chosen is not None:
            if self._sessions is not None and ask.session:
                self._sessions.put(ask.session, chosen)
            if self._prefixes is not None:
                self._prefixes.put_prompt(ask.scope, ask.prompt, chosen)
        return chosen

    def forget(self, verifier_ids: Collection[str]) -> None:
        """The verifiers have lost their caches: forgets their sessions and prefixes."""
        for each in (self._sessions, self._prefixes):
            if each is not None:
                each.forget(verifier_ids)
        self._base.forget(verifier_ids)

    def _preferred(self, ask: RoutingRequest, candidates: Sequence[RoutingCandidate]) -> str | None:
        wanted = self._sessions.get(ask.session) if self._sessions is not None and ask.session else None
        if wanted is None and self._prefixes is not None:
            wanted = self._prefixes.longest(ask.scope, ask.prompt)
        if wanted is None:
            return None
        loads = {each.id: each.load for each in candidates}
        if wanted not in loads or loads[wanted] > min(loads.values()) + self._slack:
            return None
        return wanted


def make_router(settings: GatewaySettings) -> Router:
    """The router that the settings ask for."""
    base = LeastLoaded()
    return base if settings.affinity == "none" else WithAffinity(base, settings.affinity)
