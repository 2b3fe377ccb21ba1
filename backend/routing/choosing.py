"""Routing as a gateway uses it: the router, and all that it is told about verifiers.  Pure, as the routers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from backend.fleet import VerifierStats
from backend.routing.routers import Ask, Candidate, Measured, Router
from backend.wire.engine import EngineWelcome


class Choosing:
    """One gateway's choices so far, and what the verifiers have reported of their speed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._measured: dict[str, Measured] = {}
        self._others: dict[str, int] = {}
        self._routed: Counter[str] = Counter()

    def reroute(self, router: Router) -> None:
        """Another router from now on; it knows of no sessions and prefixes yet."""
        self._router = router

    def choose(self, ask: Ask, load: Mapping[str, tuple[int, int]]) -> str | None:
        """One of the verifiers in `load`, which has the tokens and sequences of this gateway at each; None: there is none."""
        candidates = [
            Candidate(each, *mine, self._routed[each], self._measured.get(each), self._others.get(each, 0))
            for each, mine in load.items()
        ]
        return self._router.choose(ask, candidates)

    def given(self, verifier_id: str) -> None:
        """A sequence was given to this one."""
        self._routed[verifier_id] += 1

    def observe(self, stats: VerifierStats, welcome: EngineWelcome | None, own: int) -> None:
        """A verifier has reported, which has `own` requests of this gateway."""
        self._others[stats.verifier_id] = max(0, stats.running + stats.waiting - own)
        if welcome is not None and stats.speed is not None:
            room, held = welcome.num_kv_blocks * welcome.block_size, stats.kv_usage
            self._measured[stats.verifier_id] = Measured(
                stats.running, stats.waiting, (1 - held) * room, held * room, stats.speed, stats.response_tokens
            )

    def gone(self, verifier_id: str) -> None:
        """A verifier was lost: with its process went its cache."""
        self._measured.pop(verifier_id, None)
        self._others.pop(verifier_id, None)
        self._router.forget(verifier_id)

    def emptied(self, verifier_ids: Iterable[str]) -> None:
        """The prefix caches of these verifiers are empty."""
        for verifier_id in verifier_ids:
            self._router.forget(verifier_id)
