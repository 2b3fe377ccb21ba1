"""Chooses the draft tokens of a batch's rows, and decides where each draft ends.  Drafter thread.

q is `softmax(logits / temperature)` over the head's vocabulary.

- Greedy: the token maximises `log q(v)` at temperature 1.
- Shared noise: the token maximises `log q(v) + G(seed, position, v)`.
- Independent: the token is a sample of q, restricted to its `SUPPORT` likeliest tokens and by the request's `min_p`, `top_k`
  and `top_p`.  The restricted q is sent along.

The maximum is the token's value, and its lead the distance to the second.  An independent token's signs are made from its q
alone: minus the entropy, and the lead of the likeliest token.  If they depended on the token drawn, so would the verifier's
decision whether to verify it, and that would bias the text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backend import noise
from backend.drafter.proposer import Drafted, Sampling, Until
from backend.speculation.chances import CLIP, chance

SUPPORT = 64
"""Most tokens in the distribution of an independent token, by which it is sent and judged.  What the others have in common with
the target's distribution is lost: at temperature 1, 3 % of a demo token's chance, with 32 of them 5 %."""


def fresh_noise(device: torch.device) -> torch.Generator:
    """A source of noise that nobody can repeat."""
    return torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little"))


class Picked(NamedTuple):
    """One token per row, `[rows]` each.  `ids` and `chances`: the independent rows' distributions, `[such rows, M]` each."""

    tokens: Tensor
    values: Tensor
    leads: Tensor
    ids: Tensor | None = None
    chances: Tensor | None = None


class Draws:
    """Draws tokens for the rows of a batch.  `token_ids`: the token of each column; None: column number = token id."""

    def __init__(self, samplings: Sequence[Sampling], token_ids: Tensor | None, fresh: torch.Generator) -> None:
        device = fresh.device
        sampled = [sampling.temperature > 0 for sampling in samplings]
        self._token_ids = token_ids
        self._seeds = torch.tensor([sampling.seed for sampling in samplings], dtype=torch.int64, device=device)
        betas = [1 / sampling.temperature if noisy else 1.0 for sampling, noisy in zip(samplings, sampled, strict=True)]
        self._is_tempered = any(beta != 1 for beta in betas)
        self._betas = torch.tensor(betas, dtype=torch.float32, device=device)
        self.scales = torch.tensor(sampled, dtype=torch.float32, device=device)
        own = [row for row, sampling in enumerate(samplings) if sampling.independent]
        self._samples = _Samples([samplings[row] for row in own], fresh) if own else None
        self._others: Draws | None = None
        if own and len(own) < len(samplings):
            others = [row for row, sampling in enumerate(samplings) if not sampling.independent]
            self._others = Draws([samplings[row] for row in others], token_ids, fresh)
            self._parted = torch.tensor(others + own, device=device)
            """All rows, the independent ones last."""
            self._joined = self._parted.argsort()

    def pick(self, logits: Tensor, positions: Tensor) -> Picked:
        """One token for each row of `logits` `[rows, vocabulary]`, for its place in `positions` `[rows]`."""
        if self._samples is None:
            columns, scores, leads = noise.choose(logits, self._seeds, positions, self._betas, self.scales, self._token_ids)
            return Picked(self.tokens_of(columns), scores - self._totals(logits), leads)
        if self._others is None:
            columns, values, leads, support, chances = self._samples.pick(logits)
            return Picked(self.tokens_of(columns), values, leads, self.tokens_of(support), chances)
        count = len(self._others.scales)
        others = self._others.pick(logits[self._parted[:count]], positions[self._parted[:count]])
        columns, values, leads, support, chances = self._samples.pick(logits[self._parted[count:]])
        parts = zip(others[:3], (self.tokens_of(columns), values, leads), strict=True)
        tokens, values, leads = (torch.cat(part)[self._joined] for part in parts)
        return Picked(tokens, values, leads, self.tokens_of(support), chances)

    def shapes(self, logits: Tensor) -> Tensor | None:
        """The signs of a token drawn from each independent row, `[such rows, 2]`; None: there are none."""
        if self._samples is None:
            return None
        if self._others is not None:
            logits = logits[self._parted[len(self._others.scales) :]]
        return torch.stack(_shape(self._samples.restricted(logits)[1]), dim=1)

    def survey(self, logits: Tensor, positions: Tensor, count: int, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` best columns and their values, `[rows, count]` each, and the values `[rows]` of the columns `others`.

        Of independent rows, too, the values are those with shared noise: for the verifier's own token, not for drafts.
        """
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


class _Samples:
    """Samples independent rows."""

    def __init__(self, samplings: Sequence[Sampling], fresh: torch.Generator) -> None:
        self._fresh = fresh
        # A sum that should be 1 may fall short of it or pass it: without `top_p` no token must be lost by that.
        limits = [
            [
                1 / sampling.temperature,
                sampling.min_p,
                min(sampling.top_k, SUPPORT) if sampling.top_k > 0 else SUPPORT,
                sampling.top_p if sampling.top_p < 1 else 2.0,
            ]
            for sampling in samplings
        ]
        self._limits = torch.tensor(limits, dtype=torch.float32, device=fresh.device).t().unsqueeze(2)

    def restricted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and their probabilities, `[rows, M]` each, likeliest first; the order of restrictions is vLLM's."""
        betas, min_p, top_k, top_p = self._limits
        best, columns = logits.topk(min(SUPPORT, logits.shape[1]), dim=1)
        # Logits that are not finite must not make probabilities that are not.
        largest = torch.finfo(torch.float32).max
        chances = (best.float() * betas).nan_to_num(largest).softmax(1)
        places = torch.arange(chances.shape[1], device=chances.device)
        chances = chances.where((chances >= min_p * chances[:, :1]) & (places < top_k), 0.0)
        before = chances.cumsum(1) - chances
        chances = chances.where((before < top_p * chances.sum(1, keepdim=True)) | (places == 0), 0.0)
        return columns, chances / chances.sum(1, keepdim=True)

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A column, value and lead for each row, `[rows]` each, and `restricted`."""
        support, chances = self.restricted(logits)
        # In double precision, so that the token follows the float32 probabilities.  No column of probability 0 can be hit.
        bounds = chances.double().cumsum(1)
        darts = torch.rand(len(bounds), 1, dtype=torch.float64, device=bounds.device, generator=self._fresh)
        places = (bounds <= darts * bounds[:, -1:]).sum(1, keepdim=True)
        return support.gather(1, places).squeeze(1), *_shape(chances), support, chances


def _shape(chances: Tensor) -> tuple[Tensor, Tensor]:
    """Value and lead `[rows]` of a token drawn from distributions `[rows, M]`, whichever it is."""
    first, second = chances[:, 0], chances[:, min(1, chances.shape[1] - 1)]
    return torch.xlogy(chances, chances).sum(1), (first.log() - second.log()).clamp(max=CLIP)


class Ends:
    """Decides token by token where each draft of a batch ends.  `limits`: the most tokens of each draft.

    An independent draft has as many as that: if its length depended on its tokens, so would the time it takes.
    """

    def __init__(self, limits: Sequence[int], untils: Sequence[Until], samplings: Sequence[Sampling]) -> None:
        self.kept = [max(limit, 0) for limit in limits]
        self._own = [row for row, sampling in enumerate(samplings) if sampling.independent]
        self._floors = [0.0 if sampling.independent else until.floor for until, sampling in zip(untils, samplings, strict=True)]
        self._judges = [until.judge(sampling) for until, sampling in zip(untils, samplings, strict=True)]
        self._survivals = {
            row: 1.0 for row, kept in enumerate(self.kept) if kept and self._judges[row] and self._floors[row] > 0
        }
        self._longest = max((kept for row, kept in enumerate(self.kept) if row not in self._survivals), default=0)
        self._taken: list[Picked] = []

    def take(self, picked: Picked) -> bool:
        """Takes every row's next token and its signs; whether any draft goes on.  Waits for the device only if signs matter."""
        place = len(self._taken)
        self._taken.append(picked)
        if self._survivals:
            both = torch.stack((picked.values, picked.leads), dim=1).tolist()
            for row, survival in list(self._survivals.items()):
                self._follow(row, place, survival, *both[row])
        return bool(self._survivals) or place + 1 < self._longest

    def _follow(self, row: int, place: int, survival: float, value: float, lead: float) -> None:
        weights = self._judges[row]
        assert weights is not None
        survival *= chance(weights, place, value, lead)
        if survival < self._floors[row]:
            self.kept[row] = place
            del self._survivals[row]
        elif place + 1 == self.kept[row]:
            del self._survivals[row]
        else:
            self._survivals[row] = survival

    def cut(self) -> list[Drafted]:
        """The drafts of all rows, of the tokens taken."""
        taken = self._taken
        rows = torch.stack([picked.tokens for picked in taken], dim=1).tolist()
        signs = torch.stack([torch.stack((picked.values, picked.leads), dim=1) for picked in taken], dim=1).flatten(1).tolist()
        proposals = self._proposals()
        triples = enumerate(zip(rows, signs, self.kept, strict=True))
        return [Drafted(own[:kept], of[: 2 * kept], own[:1], proposals.get(row, b"")) for row, (own, of, kept) in triples]

    def _proposals(self) -> dict[int, bytes]:
        """By independent row, the distributions of its tokens, as the wire has them."""
        if not self._own:
            return {}
        ids = torch.stack([picked.ids for picked in self._taken if picked.ids is not None], dim=1)
        chances = torch.stack([picked.chances for picked in self._taken if picked.chances is not None], dim=1)
        # The bits of both in one tensor: one copy from the device.
        both = torch.stack((ids.to(torch.int32), chances.view(torch.int32)), dim=1).cpu().numpy()
        return {row: both[at, :, : self.kept[row]].tobytes() for at, row in enumerate(self._own)}
