"""Chooses the draft tokens of a batch's rows, and decides where each draft ends.  Drafter thread.

A row's token maximises `log q(v) + G(seed, position, v)`, where q is `softmax(logits / temperature)` over the head's
vocabulary.  A greedy row's token maximises `log q(v)` at temperature 1.  The maximum is the token's value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend import noise
from backend.drafter.proposer import Drafted, Sampling, Until
from backend.speculation.chances import chance


class Draws:
    """Draws tokens for the rows of a batch.  `token_ids`: the token of each column; None: column number = token id."""

    def __init__(self, samplings: Sequence[Sampling], token_ids: Tensor | None, device: torch.device) -> None:
        sampled = [sampling.temperature > 0 for sampling in samplings]
        self._token_ids = token_ids
        self._seeds = torch.tensor([sampling.seed for sampling in samplings], dtype=torch.int64, device=device)
        betas = [1 / sampling.temperature if noisy else 1.0 for sampling, noisy in zip(samplings, sampled, strict=True)]
        self._is_tempered = any(beta != 1 for beta in betas)
        self._betas = torch.tensor(betas, dtype=torch.float32, device=device)
        self.scales = torch.tensor(sampled, dtype=torch.float32, device=device)

    def pick(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen tokens, their values and their leads, `[rows]` each; `logits` `[rows, vocabulary]`, `positions` `[rows]`."""
        columns, scores, leads = noise.choose(logits, self._seeds, positions, self._betas, self.scales, self._token_ids)
        return self.tokens_of(columns), scores - self._totals(logits), leads

    def survey(self, logits: Tensor, positions: Tensor, count: int, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` best columns and their values, `[rows, count]` each, and the values `[rows]` of the columns `others`."""
        columns, scores = noise.rank(logits, self._seeds, positions, self._betas, self.scales, count, self._token_ids)
        noises = noise.gumbel(self._seeds, positions, self.tokens_of(others).unsqueeze(1)).squeeze(1)
        further = logits.gather(1, others.unsqueeze(1)).squeeze(1) * self._betas + self.scales * noises
        totals = self._totals(logits)
        return columns, scores - totals.unsqueeze(1), further - totals

    def tokens_of(self, columns: Tensor) -> Tensor:
        """The target's ids of the tokens of these columns."""
        return columns if self._token_ids is None else self._token_ids[columns]

    def _totals(self, logits: Tensor) -> Tensor:
        """Score minus this is a value: the logarithm of the softmax's denominator, `[rows]`."""
        return (logits * self._betas.unsqueeze(1) if self._is_tempered else logits).logsumexp(1)


class Ends:
    """Decides token by token where each draft of a batch ends.  `limits`: the most tokens of each draft."""

    def __init__(self, limits: Sequence[int], untils: Sequence[Until], samplings: Sequence[Sampling]) -> None:
        self.kept = [max(limit, 0) for limit in limits]
        self._floors = [until.floor for until in untils]
        self._judges = [until.judge(sampling) for until, sampling in zip(untils, samplings, strict=True)]
        self._survivals = {
            row: 1.0 for row, kept in enumerate(self.kept) if kept and self._judges[row] and self._floors[row] > 0
        }
        self._longest = max((kept for row, kept in enumerate(self.kept) if row not in self._survivals), default=0)
        self._taken = 0
        self._tokens: list[Tensor] = []
        self._values: list[Tensor] = []
        self._leads: list[Tensor] = []

    def take(self, tokens: Tensor, values: Tensor, leads: Tensor) -> bool:
        """Takes every row's next token and its signs; whether any draft goes on.  Waits for the device only if signs matter."""
        self._tokens.append(tokens)
        self._values.append(values)
        self._leads.append(leads)
        if self._survivals:
            both = torch.stack((values, leads), dim=1).tolist()
            for row, survival in list(self._survivals.items()):
                self._follow(row, survival, *both[row])
        self._taken += 1
        return bool(self._survivals) or self._taken < self._longest

    def _follow(self, row: int, survival: float, value: float, lead: float) -> None:
        weights = self._judges[row]
        assert weights is not None
        survival *= chance(weights, self._taken, value, lead)
        if survival < self._floors[row]:
            self.kept[row] = self._taken
            del self._survivals[row]
        elif self._taken + 1 == self.kept[row]:
            del self._survivals[row]
        else:
            self._survivals[row] = survival

    def cut(self) -> list[Drafted]:
        """The drafts of all rows, of the tokens taken."""
        rows = torch.stack(self._tokens, dim=1).tolist()
        signs = torch.stack((torch.stack(self._values, dim=1), torch.stack(self._leads, dim=1)), dim=2).flatten(1).tolist()
        pairs = zip(rows, signs, self.kept, strict=True)
        return [Drafted(row[:kept], row_signs[: 2 * kept], row[:1]) for row, row_signs, kept in pairs]
