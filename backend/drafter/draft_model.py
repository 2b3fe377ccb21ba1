"""Proposes with a draft model: a small language model with the target's vocabulary, decoded like a head but without features.

Drafter thread.  Row p of the cache is computed from the token at p.  So missing rows can be computed from a request's text at
any time, and a drafted token's row stays if the token is accepted.  `cache.py` is made for heads, whose row p needs the token
at p + 1.  To fit it, a sequence there begins with an extra token `START`, and all its lengths are greater by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from backend.drafter.eagle import EagleProposer
from backend.drafter.proposer import GREEDY, MAX_DRAFT, NOTHING, Ask, Drafted, Premise, Sampling, Until
from backend.wire.drafting import Outcome

START = -1
BATCH_ROWS = 2048
"""Most rows computed per batch: a long prompt is read over several batches, while other requests get their drafts."""


class ModelProposer(EagleProposer):
    """A draft model behind the `Proposer` protocol."""

    def open(self, key: Hashable, tokens: list[int], rows: int, now: float, sampling: Sampling = GREEDY) -> None:
        """Starts a sequence.  Reuses rows of an earlier one with the same prefix."""
        super().open(key, [START, *tokens], 1, now, sampling)

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int, now: float) -> bool:
        """Takes the newest tokens, and commits rows already computed for them.  A text with a hole is forgotten."""
        length = self.length(key)
        if length is not None and base_len - len(tokens) > length:
            self.close(key)
            return False
        known = super().commit(key, base_len + 1, tokens, rows, now)
        sequence = self._cache.peek(key)
        if sequence is not None and tokens:
            self._cache.adopt(sequence)
        return known

    def length(self, key: Hashable) -> int | None:
        length = super().length(key)
        return None if length is None else length - 1

    def invalidate(self) -> None:
        """Does nothing: rows do not depend on the target's weights."""

    def draft(self, batch: Sequence[Ask]) -> list[Drafted]:
        """Computes the rows that the sequences lack, then decodes together those that are to be drafted for."""
        left = BATCH_ROWS
        asks = []
        for ask in batch:
            sequence = self._cache.peek(ask.key)
            base_len = ask.base_len + 1
            if sequence is None or base_len != len(sequence.tokens) or base_len + MAX_DRAFT > self._cache.longest:
                asks.append(Ask(ask.key, base_len, 0, None))
                continue
            # Rows behind a gap, left when earlier rows were given to another sequence, are of no use.
            self._cache.truncate(sequence, sequence.unbroken)
            missing = base_len - 1 - sequence.unbroken
            rows = min(missing, left)
            left -= rows
            until = ask.until if rows == missing else Until(0)
            asks.append(Ask(ask.key, base_len - missing + rows, rows, None, until))
        drafts = super().draft(asks)
        for ask, drafted in zip(asks, drafts, strict=True):
            if drafted is not NOTHING:
                # The last draft token has no row: nothing was drafted after it.
                self._note_ahead(ask.key, drafted.tokens[:-1])
        return drafts

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        found = super().draft_outcomes([replace(premise, base_len=premise.base_len + 1) for premise in batch])
        for premise, outcomes in zip(batch, found, strict=True):
            if outcomes:
                self._note_ahead(premise.key, premise.verifying)
        return found

    def _note_ahead(self, key: Hashable, tokens: list[int]) -> None:
        sequence = self._cache.peek(key)
        if sequence is not None:
            sequence.ahead = sequence.end, tokens
