"""Enumerates likely outcomes of a verification, and drafts for each: drafting ahead with an EAGLE head.  Drafter thread.

While the target verifies `d[0..m-1]`, the head runs over these tokens, on features that it makes itself.  That yields its
distribution q_k at every position where the verification may stop.  An outcome (k, t) says that k tokens are accepted and t
comes after them.  With c_i the chance that d_i is accepted,

    P(k, t) = c_0 ... c_{k-1} (1 - c_k) r_k(t),    t != d_k for k < m, and without (1 - c_k) for k = m

where r_k is the distribution of the token that comes if d_k is rejected.  The noise is known.  So the tokens with the largest
values `log q_k + G` (greedy requests: `log q_k`) are the likeliest; a softmax over these values estimates their chances.
If the verifier has sent weights (`backend/speculation/chances.py`), c comes from them, and r_k from the values without d_k.
Otherwise both come from the values: a token's share in the softmax, which for a greedy request is q_k itself.  A token of an
independent draft was drawn without that noise, so its chance comes from the shape of its distribution alone (`draws.py`).  The
token after it is drawn with the noise all the same.

The likeliest outcomes are the branches of one tree.  They share the sequence's rows and part of the rows of the draft under
verification, and are decoded together.  The tree's rows lie behind the sequence's last row and are not counted as its own; the
next true rows overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter.cache import Sequence
from backend.drafter.draws import Draws, Ends
from backend.drafter.head import Head, Rows
from backend.drafter.proposer import MAX_DRAFT, MAX_OUTCOMES, Drafted, Premise
from backend.speculation.chances import chances
from backend.wire.drafting import Outcome

NEVER = float("-inf")
UNLIKELY = -30.0
"""The value given to a token outside the draft vocabulary, for which the head has no probability."""
UNJUDGED = (1.0, 0.0, 2.0)
"""Weights for independent drafts if the verifier has sent none: the surer the head, the likelier is its sample accepted."""
LEAST_CHANCE = 1e-6
"""Judged chances are kept this far from 0 and 1, so that logarithms stay finite."""


@dataclass(frozen=True)
class Shape:
    """Sizes that all sequences of a batch are padded to: tokens under verification, outcomes, tokens drafted per outcome."""

    depth: int
    width: int
    steps: int

    @classmethod
    def of(cls, batch: Many[Premise]) -> Shape:
        """The smallest shape that fits all of `batch`."""
        return cls(
            max((len(premise.verifying) for premise in batch), default=0),
            max((min(premise.outcomes, MAX_OUTCOMES) for premise in batch), default=0),
            max((min(premise.until.k, MAX_DRAFT) for premise in batch), default=0),
        )

    @property
    def scratch(self) -> int:
        """Cache rows needed behind a sequence's last."""
        return self.depth + self.width * self.steps


@dataclass(frozen=True)
class _Branches:
    """The chosen outcomes, `[sequences, width]` each: tokens accepted, the target's token after them, log-probability."""

    stops: Tensor
    tokens: Tensor
    scores: Tensor


class Imagination:
    """Enumerates outcomes with one head; keeps no state between calls."""

    def __init__(self, head: Head, max_position: int, fresh: torch.Generator) -> None:
        self._head = head
        self._fresh = fresh
        self._max_position = max_position
        mapping = head.draft_to_target
        self._draft_ids = None if mapping is None else {target: own for own, target in enumerate(mapping.tolist())}
        self._draft_vocab = head.lm_head.shape[1]

    def outcomes(self, premises: list[Premise], sequences: list[Sequence], shape: Shape) -> list[list[Outcome]]:
        """Outcomes with drafts, likeliest first.  Sequences need their premise's length, and `shape.scratch` spare rows."""
        outputs = self._force(premises, sequences, shape.depth)
        branches = self._choose(premises, sequences, outputs, shape)
        stops, tokens, scores = branches.stops.tolist(), branches.tokens.tolist(), branches.scores.tolist()
        # One limit per branch: 0 for padding beyond the outcomes asked for, and for impossible outcomes.
        limits = [
            min(p.until.k, MAX_DRAFT, self._max_position - p.base_len - 1 - stop) if at < p.outcomes and score > NEVER else 0
            for p, own_stops, own_scores in zip(premises, stops, scores, strict=True)
            for at, (stop, score) in enumerate(zip(own_stops, own_scores, strict=True))
        ]
        width = branches.stops.shape[1]
        ends = Ends(
            limits,
            [p.until for p in premises for _ in range(width)],
            [s.sampling for s in sequences for _ in range(width)],
        )
        drafted = self._branch(sequences, outputs, branches, ends, shape)
        return [
            [
                Outcome(stops[i][at], tokens[i][at], (draft := drafted[i * width + at]).tokens, draft.signs, draft.proposal)
                for at in range(min(premise.outcomes, width))
                if scores[i][at] > NEVER
            ]
            for i, premise in enumerate(premises)
        ]

    def _force(self, premises: list[Premise], sequences: list[Sequence], depth: int) -> Tensor:
        """The head's outputs when it is fed the draft under verification: `[sequences, depth + 1, hidden]`."""
        head = self._head
        padded = [premise.verifying + [0] * (depth - len(premise.verifying)) for premise in premises]
        ids = torch.tensor(padded, device=head.device).t().contiguous()
        positions, places = steps_behind(sequences, depth, head.device)
        starts, ones = [s.start for s in sequences], [1] * len(sequences)
        output = tips(sequences)
        outputs = [output]
        for step in range(depth):
            lengths = [s.length + 1 + step for s in sequences]
            rows = Rows(ids[step], positions[step], places[step], starts, lengths, ones)
            output = head.forward(rows, head.feature(output), None)
            outputs.append(output)
        return torch.stack(outputs, dim=1)

    def _draws(self, sequences: list[Sequence], times: int) -> Draws:
        """Draws for `times` rows of each sequence."""
        samplings = [s.sampling for s in sequences for _ in range(times)]
        return Draws(samplings, self._head.draft_to_target, self._fresh)

    def _choose(self, premises: list[Premise], sequences: list[Sequence], outputs: Tensor, shape: Shape) -> _Branches:
        """The most probable outcomes, by the module's formula.  Tensors begin with `[sequences, stops]`."""
        device, count, stops = self._head.device, len(premises), shape.depth + 1
        logits = self._head.read(outputs.flatten(0, 1))[0]
        draws = self._draws(sequences, stops)
        first = [p.base_len - 1 + self._head.token_offset for p in premises]
        at = torch.tensor(first, device=device).unsqueeze(1) + torch.arange(stops, device=device)
        # One token more than can be chosen, since the verified token is no outcome.
        size = min(max(shape.width, 1) + 1, self._draft_vocab)
        drafted = torch.tensor([self._own_ids(p.verifying, stops) for p in premises], device=device)
        lengths = torch.tensor([len(p.verifying) for p in premises], device=device).unsqueeze(1)
        columns, values, verified = draws.survey(logits, at.flatten(), size, drafted.clamp(min=0).flatten())
        columns, values = columns.view(count, stops, size), values.view(count, stops, size)
        # At the last stop there is no token to accept.
        stop = torch.arange(stops, device=device)
        verified = verified.view(count, stops).masked_fill(drafted < 0, UNLIKELY).masked_fill(stop >= lengths, NEVER)
        others = values.masked_fill(columns == drafted.unsqueeze(-1), NEVER)
        shapes = draws.shapes(logits)
        accepted, ended = self._fates(premises, sequences, draws, verified, others, shapes)
        before = (accepted.cumsum(1) - accepted).masked_fill(stop > lengths, NEVER)
        scores = (others + (before + ended).unsqueeze(-1)).flatten(1)
        chosen, where = scores.topk(min(shape.width, scores.shape[1]), dim=-1)
        tokens = draws.tokens_of(columns.flatten(1).gather(1, where))
        return _Branches(torch.div(where, size, rounding_mode="floor"), tokens, chosen)

    def _fates(
        self,
        premises: list[Premise],
        sequences: list[Sequence],
        draws: Draws,
        verified: Tensor,
        others: Tensor,
        shapes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Logarithms of each verified token's chance, and of a factor: `[sequences, stops]` each.

        The factor times exp(value) is the chance that a verification which gets here ends with the token of that value.
        `shapes`: the signs at all stops of the sequences with independent drafts.
        """
        rest = others.logsumexp(-1).clamp(min=torch.finfo(torch.float32).min)
        is_sampled = (draws.scales > 0).view(verified.shape)
        total = torch.where(is_sampled, torch.logaddexp(rest, verified), 0.0)
        accepted, ended = verified - total, -total
        leads = verified - others[..., 0].maximum(others[..., min(1, others.shape[-1] - 1)])
        signs = torch.stack((verified, leads), dim=-1)
        if shapes is not None:
            own = [i for i, sequence in enumerate(sequences) if sequence.sampling.independent]
            signs[own] = shapes.view(len(own), *signs.shape[1:])
        known = signs.flatten(1).tolist()
        for i, (premise, sequence) in enumerate(zip(premises, sequences, strict=True)):
            weights = premise.until.judge(sequence.sampling)
            if weights is None and sequence.sampling.independent:
                weights = UNJUDGED
            if weights is not None:
                count = len(premise.verifying)
                judged = torch.tensor(chances(weights, known[i][: 2 * count]), device=verified.device)
                judged = judged.clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
                accepted[i, :count] = judged.log()
                ended[i] = -rest[i]
                ended[i, :count] += torch.log1p(-judged)
        # At the last stop no token is verified: its chance must not count.
        return accepted.masked_fill(verified == NEVER, 0.0), ended

    def _own_ids(self, verifying: list[int], count: int) -> list[int]:
        """The tokens' ids in the draft vocabulary, -1 for tokens outside it; padded with -1 to `count`."""
        known = self._draft_ids
        own = [token if token < self._draft_vocab else -1 for token in verifying]
        if known is not None:
            own = [known.get(token, -1) for token in verifying]
        return own + [-1] * (count - len(own))

    def _branch(
        self, sequences: list[Sequence], outputs: Tensor, branches: _Branches, ends: Ends, shape: Shape
    ) -> list[Drafted]:
        """The drafts for all outcomes, `width` per sequence.

        In the cache, the rows of the draft under verification come first, then for each step one row per branch.
        """
        head, device = self._head, self._head.device
        count, width = branches.tokens.shape
        stride = torch.arange(count, device=device).unsqueeze(1) * (shape.depth + 1)
        feature = head.feature(outputs.flatten(0, 1).index_select(0, (stride + branches.stops).flatten()))
        last, places = steps_behind(sequences, shape.depth + 1, device)
        # Tokens beyond the last position are cut off later; until then positions must stay within the head's.
        positions = (last[0].unsqueeze(1) + branches.stops).flatten()
        furthest = head.positions - 1
        first = (places[-1].unsqueeze(1) + torch.arange(width, device=device)).flatten()
        starts, counts = [s.start for s in sequences], [width] * count
        masks = self._masks(sequences, branches.stops, shape)
        draws = self._draws(sequences, width)
        ids = branches.tokens.flatten()
        for step in range(shape.steps):
            lengths = [s.length + shape.depth + (step + 1) * width for s in sequences]
            at = (positions + step).clamp_(max=furthest)
            rows = Rows(ids, at, first + step * width, starts, lengths, counts, masks)
            logits, feature = head.read(head.forward(rows, feature, None))
            picked = draws.pick(logits, positions + step + head.token_offset + 1)
            if not ends.take(picked):
                break
            ids = picked.tokens
        return ends.cut()

    def _masks(self, sequences: list[Sequence], stops: Tensor, shape: Shape) -> list[Tensor]:
        """Per sequence, what each branch may attend to: the sequence's rows, the draft's rows before its stop, and its own."""
        head, (count, width) = self._head, stops.shape
        drafted = torch.arange(shape.depth, device=head.device) < stops.unsqueeze(-1)
        own = torch.eye(width, dtype=torch.bool, device=head.device).repeat(1, shape.steps)
        visible = torch.cat((drafted, own.expand(count, -1, -1)), dim=-1)
        hidden = torch.zeros(visible.shape, dtype=head.dtype, device=head.device).masked_fill_(~visible, NEVER)
        folded = hidden.repeat_interleave(head.group, 1)
        return [functional.pad(mask, (s.length, 0)) for mask, s in zip(folded, sequences, strict=True)]


def tips(sequences: Many[Sequence]) -> Tensor:
    """The sequences' tips, the outputs that drafting starts from: `[sequences, hidden]`."""
    outputs = [sequence.tip[1] for sequence in sequences if sequence.tip is not None]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def steps_behind(sequences: Many[Sequence], steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions and cache places of the next `steps` rows behind each sequence's last: `[steps, sequences]` each."""
    first = [[sequence.tip[0] - 1 if sequence.tip else 0 for sequence in sequences], [s.start + s.length for s in sequences]]
    packed = torch.tensor(first, device=device).unsqueeze(1) + torch.arange(steps, device=device).view(1, -1, 1)
    return packed[0], packed[1]
