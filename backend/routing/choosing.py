"""Decides which verifier a request goes to.  Pure: loads in, an id out; no clock, no socket.

Runs in the gateway's event loop, once per sequence.  The verifier with the fewest tokens of this gateway in flight is chosen,
unless the setting `affinity` prefers the one that has seen a session, or the beginning of a prompt, before.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from backend.config.settings import Affinity
from backend.fleet import VerifierStats
from backend.routing.affinity import PrefixMap, RecentMap

SLACK = 8
"""A verifier is preferred only while it has at most 8 requests more than the least loaded one: a popular prefix must not fill
one verifier while others idle."""
ENTRIES = 65536
"""Most sessions, and most prompt blocks of 16 tokens, that are remembered."""


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """What routing may know of a request."""

    prompt: Sequence[int] = ()
    scope: str = ""
    """Adapter and cache salt: cached prefixes are shared only between requests of one scope."""
    session: str | None = None


class Choosing:
    """Chooses verifiers by this gateway's choices so far and by the verifiers' reports."""

    def __init__(self, affinity: Affinity) -> None:
        self._others: dict[str, int] = {}
        """Requests of other gateways at each verifier, by its latest report."""
        self._routed: Counter[str] = Counter()
        self.prefer(affinity)

    def prefer(self, affinity: Affinity) -> None:
        """Prefers verifiers so from now on; no sessions and prefixes are known yet."""
        self._sessions = RecentMap[str](ENTRIES) if affinity in ("session", "both") else None
        self._prefixes = PrefixMap(ENTRIES) if affinity in ("prefix", "both") else None

    def choose(self, ask: RoutingRequest, load: Mapping[str, tuple[int, int]]) -> str | None:
        """One of the verifiers in `load` (this gateway's tokens and sequences at each); None: it is empty.

        Of those with the fewest tokens it is the one with the fewest sequences, then the one used least.
        """
        if not load:
            return None
        chosen = self._preferred(ask, load) or min(load, key=lambda each: (*load[each], self._routed[each], each))
        if self._sessions is not None and ask.session:
            self._sessions.put(ask.session, chosen)
        if self._prefixes is not None:
            self._prefixes.put_prompt(ask.scope, ask.prompt, chosen)
        return chosen

    def _preferred(self, ask: RoutingRequest, load: Mapping[str, tuple[int, int]]) -> str | None:
        """Where the session, or else the longest known beginning of the prompt, went before; None: there is no reason to."""
        wanted = self._sessions.get(ask.session) if self._sessions is not None and ask.session else None
        if wanted is None and self._prefixes is not None:
            wanted = self._prefixes.longest(ask.scope, ask.prompt)
        if wanted is None or wanted not in load:
            return None
        requests = {each: own + self._others.get(each, 0) for each, (_, own) in load.items()}
        return wanted if requests[wanted] <= min(requests.values()) + SLACK else None

    def given(self, verifier_id: str) -> None:
        self._routed[verifier_id] += 1

    def observe(self, stats: VerifierStats, own: int) -> None:
        """Takes in a verifier's report; `own` of its sequences are this gateway's."""
        self._others[stats.verifier_id] = max(0, stats.running + stats.waiting - own)

    def gone(self, verifier_id: str) -> None:
        """Forgets a lost verifier, whose prefix cache is lost with its process."""
        self._others.pop(verifier_id, None)
        self.emptied([verifier_id])

    def emptied(self, verifier_ids: Collection[str]) -> None:
        """These verifiers have lost their caches: forgets their sessions and prefixes."""
        for each in (self._sessions, self._prefixes):
            if each is not None:
                each.forget(verifier_ids)
