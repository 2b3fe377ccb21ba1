"""Routing as a gateway uses it: the router, and what it knows about verifiers.  Pure, as the routers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from backend.fleet import VerifierStats
from backend.routing.routers import Router, RoutingCandidate, RoutingRequest


class Choosing:
    """Chooses verifiers by this gateway's choices so far and by the verifiers' reports."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._others: dict[str, int] = {}
        self._routed: Counter[str] = Counter()

    def reroute(self, router: Router) -> None:
        """Uses another router from now on.  The new router knows no sessions and prefixes yet."""
        self._router = router

    def choose(self, ask: RoutingRequest, load: Mapping[str, tuple[int, int]]) -> str | None:
        """One of the verifiers in `load` (this gateway's tokens and sequences at each); None: it is empty."""
        candidates = [
            RoutingCandidate(each, *mine, self._routed[each], self._others.get(each, 0)) for each, mine in load.items()
        ]
        return self._router.choose(ask, candidates)

    def given(self, verifier_id: str) -> None:
        self._routed[verifier_id] += 1

    def observe(self, stats: VerifierStats, own: int) -> None:
        """Takes in a verifier's report; `own` of its sequences are this gateway's."""
        self._others[stats.verifier_id] = max(0, stats.running + stats.waiting - own)

    def gone(self, verifier_id: str) -> None:
        """Forgets a lost verifier, whose prefix cache is lost with its process."""
        self._others.pop(verifier_id, None)
        self._router.forget([verifier_id])

    def emptied(self, verifier_ids: Collection[str]) -> None:
        self._router.forget(verifier_ids)
