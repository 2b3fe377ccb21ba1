"""Decides which verifier a request goes to.  Pure: loads in, an id out; no clock, no socket.

Runs in the gateway's event loop, once per sequence.  The verifier with the fewest tokens of this gateway in flight is chosen,
unless the setting `affinity` prefers the one that has seen a session, or the beginning of a prompt, before.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from backend.config.settings import Affinity
from backend.fleet import VerifierStats

SLACK = 8
"""A verifier is preferred only while it has at most 8 requests more than the least loaded one: a popular prefix must not fill
one verifier while others idle."""
ENTRIES = 65536
"""Most sessions, and most prompt blocks of 16 tokens, that are remembered."""
BLOCK_TOKENS = 16
"""Tokens per block, as in vLLM's own prefix cache, which reuses a block whole or not at all."""
LONGEST_PREFIX_BLOCKS = 512
"""Only the first 512 blocks of a prompt are compared: 8192 equal tokens are enough to choose a verifier."""


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """What routing may know of a request; `InFlight.ask` (`gateway/fleet/sequences.py`) fills it in."""

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
        self._seen = [(keys, Seen(ENTRIES)) for kind, keys in _KEYS.items() if affinity in (kind, "both")]

    def choose(self, ask: RoutingRequest, load: Mapping[str, tuple[int, int]]) -> str | None:
        """One of the verifiers in `load` (this gateway's tokens and sequences at each); None: it is empty.

        Of those with the fewest tokens it is the one with the fewest sequences, then the one used least.
        """
        if not load:
            return None
        keyed = [(seen, keys(ask)) for keys, seen in self._seen]
        before = next((found for seen, keys in keyed if (found := seen.longest(keys)) is not None), None)
        if before is not None and self._has_slack(before, load):
            chosen = before
        else:
            chosen = min(load, key=lambda each: (*load[each], self._routed[each], each))
        for seen, keys in keyed:
            seen.put(keys, chosen)
        return chosen

    def _has_slack(self, verifier_id: str, load: Mapping[str, tuple[int, int]]) -> bool:
        """Whether a verifier may take requests, and has no more than `SLACK` above the least loaded one."""
        requests = {each: own + self._others.get(each, 0) for each, (_, own) in load.items()}
        return verifier_id in load and requests[verifier_id] <= min(requests.values()) + SLACK

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
        for _, seen in self._seen:
            seen.forget(verifier_ids)


class Seen:
    """Hash of a session, or of a prompt's beginning -> the verifier that had it last.

    Beyond `entries`, the key unused for longest is dropped.  A collision only sends a request to a less suitable verifier.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._verifiers: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verifiers)

    def longest(self, keys: Sequence[int]) -> str | None:
        """The verifier of the last key of those known, up to the first unknown one; None if the first is not known."""
        found = None
        for key in keys:
            verifier_id = self._verifiers.get(key)
            if verifier_id is None:
                break
            found = verifier_id
        return found

    def put(self, keys: Sequence[int], verifier_id: str) -> None:
        """Remembers that `keys` went to this verifier; counts as a use of them."""
        # The last block first: when memory runs out, a prompt loses its end before its beginning.
        for key in reversed(keys):
            self._verifiers[key] = verifier_id
            self._verifiers.move_to_end(key)
            if len(self._verifiers) > self._entries:
                self._verifiers.popitem(last=False)

    def forget(self, verifier_ids: Collection[str]) -> None:
        """Nothing put under these verifiers so far is found again."""
        for key in [key for key, found in self._verifiers.items() if found in verifier_ids]:
            del self._verifiers[key]


def _session(ask: RoutingRequest) -> list[int]:
    return [hash(ask.session)] if ask.session else []


def _prefix(ask: RoutingRequest) -> list[int]:
    """A hash per whole block of the prompt, over all tokens up to its end."""
    keys = []
    key = hash(ask.scope)
    for start in range(0, min(len(ask.prompt) // BLOCK_TOKENS, LONGEST_PREFIX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, *ask.prompt[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys


_KEYS: dict[str, Callable[[RoutingRequest], list[int]]] = {"session": _session, "prefix": _prefix}
"""What is remembered of a request by each affinity; a known session counts before a known prefix.  `both` has all of these."""
