"""A request as a proposer sees it: tokens, and features that follow from them.  Tests only."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.drafter.proposer import GREEDY, Drafted, DraftRequest, Premise, Proposer, Sampling, Until


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Session:
    """A request of a proposer: its tokens, and the features that the proposer was given, by position.

    Features follow from the tokens, as a target's do.
    """

    def __init__(self, proposer: Proposer, key: object, tokens: list[int], skip: int = 0, sampling: Sampling = GREEDY) -> None:
        """`skip`: first positions for which the target computes no features."""
        self.proposer, self.key, self.tokens, self.sampling = proposer, key, list(tokens), sampling
        self.seen: dict[int, Tensor] = {}
        self._new = len(tokens) - 1 - skip
        proposer.open(key, list(tokens), self._new, sampling)

    def commit(self, tokens: list[int]) -> Session:
        self.tokens += tokens
        assert self.proposer.commit(self.key, len(self.tokens), tokens, len(tokens))
        self._new = len(tokens)
        return self

    def ask(self, until: Until | int) -> DraftRequest:
        """Asks for a draft, with the features of positions that are new."""
        stop, count, self._new = len(self.tokens) - 1, self._new, 0
        rows = {position: self.feature(position) for position in range(stop - count, stop)}
        self.seen |= rows
        features = torch.stack(list(rows.values())) if rows else None
        return DraftRequest(self.key, stop + 1, count, features, until if isinstance(until, Until) else Until(until))

    def draft(self, until: Until | int = 4) -> Drafted:
        return self.proposer.draft([self.ask(until)])[0]

    def premise(self, verifying: list[int], outcomes: int = 8, k: int = 4) -> Premise:
        return Premise(self.key, len(self.tokens), Until(k), verifying, outcomes)

    def feature(self, position: int) -> Tensor:
        seed = hash(tuple(self.tokens[: position + 1])) & 0x7FFFFFFF
        return torch.randn(self.proposer.hidden, generator=torch.Generator().manual_seed(seed))


def begun(proposer: Proposer, key: object, length: int, sampling: Sampling = GREEDY) -> Session:
    """A session with so many random tokens, whose features the proposer has."""
    session = Session(proposer, key, tokens_of(int(str(key)), length), 0, sampling)
    session.draft(0)
    return session
