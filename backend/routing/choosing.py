"""Routing as a gateway uses it: the router, and what it knows about verifiers.  Pure, as the routers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from backend.fleet import VerifierStats
from backend.routing.routers import Ask, Candidate, Measured, Router
from backend.wire.engine import EngineWelcome


class Choosing:
    """Chooses verifiers by this gateway's choices so far and by the verifiers' reports."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._measured: dict[str, Measured] = {}
        self._others: dict[str, int] = {}
        self._routed: Counter[str] = Counter()

    def reroute(self, router: Router) -> None:
        """Uses another router from now on.  The new router knows no sessions and prefixes yet."""
        self._router = router

    def choose(self, ask: Ask, load: Mapping[str, tuple[int, int]]) -> str | None:
        """One of the verifiers in `load` (this gateway's tokens and sequences at each); None: it is empty."""
        candidates = [
            Candidate(each, *mine, self._routed[each], self._measured.get(each), self._others.get(each, 0))
            for each, mine in load.items()
        ]
        return self._router.choose(ask, candidates)

    def given(self, verifier_id: str) -> None:
        self._routed[verifier_id] += 1

    def observe(self, stats: VerifierStats, welcome: EngineWelcome | None, own: int) -> None:
        """Takes in a verifier's report; `own` of its sequences are this gateway's."""
        self._others[stats.verifier_id] = max(0, stats.running + stats.waiting - own)
        if welcome is not None and stats.speed is not None:
            room, held = welcome.num_kv_blocks * welcome.block_size, stats.kv_usage
            self._measured[stats.verifier_id] = Measured(
                stats.running, stats.waiting, (1 - held) * room, held * room, stats.speed, stats.response_tokens
            )

    def gone(self, verifier_id: str) -> None:
        """Forgets a lost verifier, whose prefix cache is lost with its process."""
        self._measured.pop(verifier_id, None)
        self._others.pop(verifier_id, None)
        self._router.forget([verifier_id])

    def emptied(self, verifier_ids: Collection[str]) -> None:
        self._router.forget(verifier_ids)
