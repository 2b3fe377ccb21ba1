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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend import noise
from backend.drafter.proposer import Drafted, Sampling, Until
from backend.speculation.chances import CLIP, chances, chances_over

Proposals = npt.NDArray[np.int32]
Signs = npt.NDArray[np.float32]
Limits = npt.NDArray[np.int64]
SUPPORT = 64
"""Most tokens in the distribution of an independent token, by which it is sent and judged.  What the others have in common with
the target's distribution is lost: at temperature 1, 3 % of a demo token's chance, with 32 of them 5 %."""
FEW = 32
"""Tokens from which on their chances are computed faster over arrays than one by one."""


def fresh_noise(device: torch.device) -> torch.Generator:
    """A source of noise that nobody can repeat."""
    return torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little"))


class Picked(NamedTuple):
    """One token per row, `[rows]` each.  `ids` and `chances`, `[rows, M]`: an independent row's distribution."""

    tokens: Tensor
    values: Tensor
    leads: Tensor
    ids: Tensor | None = None
    chances: Tensor | None = None


class Rules(NamedTuple):
    """Which rules the rows of a batch have; what none of them needs is not computed."""

    shared: bool = True
    """Some row is greedy or has shared noise."""
    independent: bool = True
    restricted: bool = True
    """Some independent row has `min_p`, `top_k` or `top_p`."""

    @classmethod
    def needed_by(cls, samplings: Sequence[Sampling]) -> Rules:
        own = [sampling for sampling in samplings if sampling.independent]
        restricted = any(each.min_p > 0 or 0 < each.top_k < SUPPORT or each.top_p < 1 for each in own)
        return cls(len(own) < len(samplings), bool(own), restricted)

    def captured(self) -> Rules:
        """The first of `CAPTURED` that computes all that these rows need."""
        return next(kind for kind in CAPTURED if all(has >= needs for has, needs in zip(kind, self, strict=True)))


SHARED, INDEPENDENT = Rules(True, False, False), Rules(False, True, False)
CAPTURED = SHARED, INDEPENDENT, Rules()
"""Rules for which steps are captured as CUDA graphs."""


SAMPLING_COLUMNS = 6


def columns_of(samplings: Sequence[Sampling]) -> list[list[float]]:
    """`SAMPLING_COLUMNS` numbers for each row: what `Draws` takes besides seeds."""
    # A sum that should be 1 may fall short of it or pass it: without `top_p` no token must be lost by that.
    return [
        [1 / each.temperature if each.temperature else 1.0 for each in samplings],
        [float(each.temperature > 0) for each in samplings],
        [float(each.independent) for each in samplings],
        [each.min_p for each in samplings],
        [float(min(each.top_k, SUPPORT) if each.top_k > 0 else SUPPORT) for each in samplings],
        [each.top_p if each.top_p < 1 else 2.0 for each in samplings],
    ]


class Draws:
    """Draws tokens for the rows of a batch.

    `seeds`: int64 `[rows]`; `columns`: `columns_of` as float32 `[SAMPLING_COLUMNS, rows]`; `token_ids`: the token of each
    column of logits, None: column number = token id.  Tensors may change between calls.
    """

    def __init__(self, seeds: Tensor, columns: Tensor, token_ids: Tensor | None, rules: Rules) -> None:
        self._seeds, self._token_ids, self._rules = seeds, token_ids, rules
        self._betas, self._scales, self._own, self._min_p, self._top_k, self._top_p = columns.unbind()

    @property
    def independent(self) -> Tensor:
        """Whether each row is independent, bool `[rows]`."""
        return self._own > 0

    def pick(self, logits: Tensor, positions: Tensor, darts: Tensor) -> Picked:
        """One token for each row of `logits` `[rows, vocabulary]`, for its place in `positions` `[rows]`.

        `darts`: fresh uniform numbers in [0, 1), float64 `[rows]`, by which independent rows are drawn.
        """
        picked = []
        if self._rules.shared:
            # Noise that may still draw an independent row's later tokens is not read, not even in vain: that would take time.
            scales = self._scales * ~self.independent if self._rules.independent else self._scales
            given = self._seeds, positions, self._betas, scales, self._token_ids
            columns, scores, leads, totals = noise.choose(logits, *given, totals=True)
            assert totals is not None
            picked.append((columns, scores - totals, leads))
        support = chances = None
        if self._rules.independent:
            support, chances = self._restricted(logits)
            # In double precision, so that the token follows the float32 probabilities.  No column of probability 0 can be hit.
            bounds = chances.cumsum(1, dtype=torch.float64)
            places = torch.searchsorted(bounds, darts.unsqueeze(1) * bounds[:, -1:], right=True)
            picked.append((support.gather(1, places).squeeze(1), *_shape(chances)))
            support = self.tokens_of(support)
        columns, values, leads = picked[0]
        if len(picked) == 2:
            columns, values, leads = (torch.where(self.independent, own, other) for other, own in zip(*picked, strict=True))
        return Picked(self.tokens_of(columns), values, leads, support, chances)

    def shapes(self, logits: Tensor) -> Tensor | None:
        """The signs of a token drawn independently from each row, `[rows, 2]`; None: no row is independent."""
        return torch.stack(_shape(self._restricted(logits)[1]), dim=1) if self._rules.independent else None

    def survey(self, logits: Tensor, positions: Tensor, count: int, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` best columns and their values, `[rows, count]` each, and the values `[rows]` of the columns `others`.

        Of independent rows, too, the values are those with shared noise: for the verifier's own token, not for drafts.
        """
        columns, scores = noise.rank(logits, self._seeds, positions, self._betas, self._scales, count, self._token_ids)
        noises = noise.gumbel(self._seeds, positions, self.tokens_of(others).unsqueeze(1)).squeeze(1)
        further = logits.gather(1, others.unsqueeze(1)).squeeze(1) * self._betas + self._scales * noises
        totals = (logits * self._betas.unsqueeze(1)).logsumexp(1)
        return columns, scores - totals.unsqueeze(1), further - totals

    def tokens_of(self, columns: Tensor) -> Tensor:
        """The target's ids of the tokens of these columns."""
        return columns if self._token_ids is None else self._token_ids[columns]

    def _restricted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and their probabilities, `[rows, M]` each, likeliest first; the order of restrictions is vLLM's."""
        best, columns = _likeliest(logits, min(SUPPORT, logits.shape[1]))
        # Logits that are not finite must not make probabilities that are not.
        largest = torch.finfo(torch.float32).max
        chances = (best.float() * self._betas.unsqueeze(1)).nan_to_num(largest).softmax(1)
        if not self._rules.restricted:
            return columns, chances
        places = torch.arange(chances.shape[1], device=chances.device)
        likely = chances >= self._min_p.unsqueeze(1) * chances[:, :1]
        chances = chances.where(likely & (places < self._top_k.unsqueeze(1)), 0.0)
        before = chances.cumsum(1) - chances
        chances = chances.where((before < self._top_p.unsqueeze(1) * chances.sum(1, keepdim=True)) | (places == 0), 0.0)
        return columns, chances / chances.sum(1, keepdim=True)


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row in descending order, and their columns."""
    if logits.is_cuda:
        return logits.topk(count, dim=1)
    # NumPy finds 64 of 2,048 in 8 us a row, torch in 25.
    columns = torch.from_numpy(np.argpartition(logits.numpy(), -count, axis=1)[:, -count:])
    best, order = logits.gather(1, columns).sort(dim=1, descending=True)
    return best, columns.gather(1, order)


def _shape(chances: Tensor) -> tuple[Tensor, Tensor]:
    """Value and lead `[rows]` of a token drawn from distributions `[rows, M]`, whichever it is."""
    first, second = chances[:, 0], chances[:, min(1, chances.shape[1] - 1)]
    return torch.xlogy(chances, chances).sum(1), (first / second).log().clamp(max=CLIP)


class Ends:
    """Decides where each draft of a batch ends.  `limits`: the most tokens of each draft.

    Each of `untils` and `samplings` is for equally many of the drafts.  An independent draft has as many tokens as its limit:
    if its length depended on its tokens, so would the time it takes.
    """

    def __init__(self, limits: Sequence[int] | Limits, untils: Sequence[Until], samplings: Sequence[Sampling]) -> None:
        pairs = list(zip(untils, samplings, strict=True))
        self._each = each = len(limits) // len(untils)
        floors = [until.floor if until.chance_weights and not own.independent else 0.0 for until, own in pairs]
        judges = [until.judge(own) or (0.0, 0.0, 0.0) for until, own in pairs]
        longest = max(map(len, judges))
        self._judges = [[*its, *[its[-1]] * (longest - len(its))] for its in judges]
        self.kept: Limits = np.maximum(limits, 0)
        """How many of its tokens each draft keeps, as far as these are known."""
        self._own = np.repeat([own.independent for own in samplings], each)
        self._floors, self._is_judged = np.repeat(floors, each), any(floors)
        self._weights = np.repeat(self._judges, each, axis=0).T
        self._survivals = np.ones(len(limits))
        self._taken = 0

    def take(self, signs: Signs) -> bool:
        """Takes every row's next tokens; whether any draft goes on.  `signs`: their values and leads, `[2, tokens, rows]`."""
        before, self._taken = self._taken, self._taken + signs.shape[1]
        if self._is_judged:
            (self._follow if signs[0].size < FEW else self._follow_many)(before, signs)
        return bool((self.kept > self._taken).any())

    def _follow(self, before: int, signs: Signs) -> None:
        """Cuts drafts where their survival falls below the floor, `before` tokens having been taken earlier."""
        for row, own in enumerate(signs.T.reshape(len(self.kept), -1).tolist()):
            (a, b, *offsets), survival = self._judges[row // self._each], float(self._survivals[row])
            for place, chance in enumerate(chances([a, b, *(offsets[before:] or offsets[-1:])], own), before):
                survival *= chance
                if survival < self._floors[row]:
                    self.kept[row] = min(self.kept[row], place)
                    break
            self._survivals[row] = survival

    def _follow_many(self, before: int, signs: Signs) -> None:
        """`_follow` over arrays."""
        offsets = self._weights[np.minimum(np.arange(before, self._taken) + 2, len(self._weights) - 1)]
        value, lead = np.fmin(CLIP, np.fmax(-CLIP, signs))
        found = chances_over(self._weights[0], self._weights[1], offsets, value, lead)
        found[0] *= self._survivals
        survivals = found.cumprod(0)
        self._survivals = survivals[-1]
        # Survival never grows.
        ends = before + (survivals >= self._floors).sum(0)
        self.kept = np.where(ends < self._taken, np.minimum(self.kept, ends), self.kept)

    def cut(self, tokens: list[list[int]], signs: list[list[float]], proposals: Proposals | None) -> list[Drafted]:
        """The drafts of all rows, of their tokens and signs; `proposals`: int32 `[rows, 2, tokens, M]`, as on the wire."""
        triples = enumerate(zip(tokens, signs, self.kept.tolist(), strict=True))
        return [
            Drafted(own[:kept], of[: 2 * kept], own[:1], self._proposal(proposals, row)) for row, (own, of, kept) in triples
        ]

    def _proposal(self, proposals: Proposals | None, row: int) -> bytes:
        if proposals is None or not self._own[row]:
            return b""
        return proposals[row, :, : self.kept[row]].tobytes()
