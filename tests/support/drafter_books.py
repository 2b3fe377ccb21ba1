"""Reference drafts of an EAGLE head, computed from the equations: one sequence, float64, noise by definition.  Tests only."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.drafter.eagle import EagleProposer
from backend.drafter.proposer import GREEDY, Ask, Premise, Sampling, Until
from tests.support.drafter_heads import Reference, TinyHead
from tests.support.true_noise import true_gumbel


class Book(Reference):
    """A `Reference` that drafts after assumed tokens, with shared noise; it keeps the scores of all tokens."""

    def __init__(self, head: TinyHead, seed: int = 0, temperature: float = 0.0, tau: float = 1.0) -> None:
        super().__init__(head)
        self.seed, self.temperature, self.tau = seed, temperature, tau
        self.values: list[dict[int, float]] = []
        """By draft position: log-probability, plus noise at a temperature, of every token of the draft vocabulary."""

    def follow(self, tokens: list[int], features: dict[int, Tensor], assumed: list[int], k: int) -> list[int]:
        """`k` draft tokens after `tokens + assumed`; after `tokens`, features are the head's own outputs."""
        self.margin = float("inf")
        self.values = []
        rows = [(p, tokens[p + 1], features[p].double()) for p in sorted(features) if p + 1 < len(tokens)]
        drafts: list[int] = []
        for step in range(len(assumed) + k):
            output = self._forward(rows)
            eagle_1 = self.head.kind == "eagle"
            normed = output if eagle_1 else self._norm(output, "norm")
            logits = self.w["target.lm_head" if eagle_1 else "lm_head.weight"] @ normed
            offsets = self.w.get("d2t", torch.zeros(len(logits)))
            ids = [own + int(offsets[own]) for own in range(len(logits))]
            values = (logits / (self.temperature or 1.0)).log_softmax(-1)
            if self.temperature:
                at = len(tokens) + step
                values = values + self.tau * torch.tensor([true_gumbel(self.seed, at, token) for token in ids])
            self.values.append(dict(zip(ids, values.tolist(), strict=True)))
            if step < len(assumed):
                token = assumed[step]
            else:
                best = values.topk(2).values
                self.margin = min(self.margin, float(best[0] - best[1]))
                token = ids[int(values.argmax())]
                drafts.append(token)
            rows.append((rows[-1][0] + 1, token, normed if self.head.norm_output else output))
        return drafts


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Request:
    """A request with random tokens and features, opened on a proposer."""

    def __init__(self, proposer: EagleProposer, head: TinyHead, key: object, length: int, sampling: Sampling = GREEDY) -> None:
        seed = int(str(key))
        self.proposer, self.key, self.tokens = proposer, key, tokens_of(seed, length)
        self.features = torch.randn(length + 40, head.hidden, generator=torch.Generator().manual_seed(seed))
        proposer.open(key, list(self.tokens), length - 1, 0.0, sampling)
        proposer.draft([Ask(key, length, length - 1, self.features[: length - 1])])

    @property
    def known(self) -> dict[int, Tensor]:
        return {p: self.features[p] for p in range(len(self.tokens) - 1)}

    def fresh(self, k: int = 4) -> list[int]:
        return self.proposer.draft([Ask(self.key, len(self.tokens), 0, None, Until(k))])[0].tokens

    def commit(self, tokens: list[int], k: int) -> list[int]:
        self.tokens += tokens
        stop = len(self.tokens) - 1
        assert self.proposer.commit(self.key, len(self.tokens), tokens, len(tokens), 0.0)
        rows = self.features[stop - len(tokens) : stop]
        return self.proposer.draft([Ask(self.key, len(self.tokens), len(tokens), rows, Until(k))])[0].tokens

    def premise(self, verifying: list[int], outcomes: int = 8, k: int = 4) -> Premise:
        return Premise(self.key, len(self.tokens), Until(k), verifying, outcomes)
