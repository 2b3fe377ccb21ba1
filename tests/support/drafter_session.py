"""A request of a drafter whose features follow from its tokens, as a target's do.  Tests only."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.drafter.proposer import GREEDY, DraftRequest, Proposer, Sampling, Until


class Session:
    """One request, its tokens, and the features that the drafter was given, by position."""

    def __init__(self, proposer: Proposer, key: object, tokens: list[int], skip: int = 0, sampling: Sampling = GREEDY) -> None:
        """`skip`: first positions for which the target computes no features."""
        self.proposer, self.key, self.tokens, self.sampling = proposer, key, list(tokens), sampling
        self.seen: dict[int, Tensor] = {}
        self.new = len(tokens) - 1 - skip
        proposer.open(key, list(tokens), self.new, 0.0, sampling)

    def commit(self, tokens: list[int]) -> Session:
        self.tokens += tokens
        assert self.proposer.commit(self.key, len(self.tokens), tokens, len(tokens), 0.0)
        self.new = len(tokens)
        return self

    def ask(self, k: int) -> DraftRequest:
        """Asks for a draft of `k` tokens, with the features of the newest positions."""
        stop = len(self.tokens) - 1
        rows = {position: self.feature(position) for position in range(stop - self.new, stop)}
        self.seen |= rows
        features = torch.stack(list(rows.values())) if rows else None
        return DraftRequest(self.key, len(self.tokens), self.new, features, Until(k))

    def feature(self, position: int) -> Tensor:
        seed = hash(tuple(self.tokens[: position + 1])) & 0x7FFFFFFF
        return torch.randn(self.proposer.hidden, generator=torch.Generator().manual_seed(seed))
