"""Proposes without weights: prompt lookup over a request's own tokens (`backend/speculation/lookup.py`).  Drafter thread."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from backend.drafter.proposer import GREEDY, MAX_DRAFT, Drafted, DraftRequest, Premise, ProposerStats, Sampling
from backend.speculation.lookup import LONGEST, SHORTEST, Lookup
from backend.wire.drafting import Outcome, TargetTensor


class NgramProposer:
    """Prompt lookup behind the `Proposer` protocol; holds at most `cache_tokens` tokens over all requests."""

    hidden = 0
    borrowed: frozenset[TargetTensor] = frozenset()

    def __init__(self, vocab_size: int, max_position: int, cache_tokens: int) -> None:
        self.vocab_size = vocab_size
        self.max_position = max_position
        self._capacity = cache_tokens
        self._lookups: OrderedDict[Hashable, Lookup] = OrderedDict()
        self._held = 0
        self._evictions = 0

    def open(self, key: Hashable, tokens: list[int], rows: int, sampling: Sampling = GREEDY) -> None:
        self.close(key)
        self._lookups[key] = Lookup(tokens, SHORTEST, LONGEST)
        self._held += len(tokens)
        self._make_room(key)

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int) -> bool:
        lookup = self._lookups.get(key)
        if lookup is None:
            return False
        self._lookups.move_to_end(key)
        if tokens or base_len > len(lookup.tokens):
            before = len(lookup.tokens)
            lookup.update(base_len, tokens)
            self._held += len(lookup.tokens) - before
            self._make_room(key)
        return True

    def close(self, key: Hashable) -> None:
        lookup = self._lookups.pop(key, None)
        if lookup is not None:
            self._held -= len(lookup.tokens)

    def draft(self, batch: Sequence[DraftRequest]) -> list[Drafted]:
        """A look-up for each request.  Look-ups have no signs, so no floor ends them early."""
        drafts: list[Drafted] = []
        for ask in batch:
            lookup = self._lookups.get(ask.key)
            k = min(ask.until.k, MAX_DRAFT, self.max_position - ask.base_len)
            usable = lookup is not None and k > 0 and len(lookup.tokens) == ask.base_len
            drafts.append(Drafted(lookup.draft(k) if lookup is not None and usable else [], []))
        return drafts

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        """None: a fresh look-up takes less time than its way to the verifier."""
        return [[] for _ in batch]

    def length(self, key: Hashable) -> int | None:
        lookup = self._lookups.get(key)
        return None if lookup is None else len(lookup.tokens)

    def invalidate(self) -> None:
        """Does nothing: look-ups do not depend on the target's weights."""

    def usage(self) -> ProposerStats:
        return ProposerStats(len(self._lookups), min(self._held / self._capacity, 1.0), self._evictions)

    def _make_room(self, keep: Hashable) -> None:
        while self._held > self._capacity and len(self._lookups) > 1:
            oldest = next(key for key in self._lookups if key != keep)
            self.close(oldest)
            self._evictions += 1
