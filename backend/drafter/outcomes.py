"""Imagines how a verification may end, and drafts for each end: the mode `ahead` with an EAGLE head.  Drafter thread.

While the target verifies `d[0..m-1]`, the head runs over the same tokens on features of its own making.  That yields its
distribution q_k of every position at which the verification may stop.  An outcome (k, t) says that k tokens are accepted and t
comes after them.  Taking q as the target's own choice, token d_i is accepted with probability q_i(d_i) and a rejected one is
replaced by t with q_k(t) / (1 - q_k(d_k)), so that

    P(k, t) = q_0(d_0) ... q_{k-1}(d_{k-1}) q_k(t),    t != d_k for k < m

The likeliest outcomes are the branches of one tree: they share the sequence's rows and their part of the drafted ones, and
are decoded together.  All of its rows lie behind the sequence's last row, in no one's books; the next true rows replace them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter.cache import Sequence
from backend.drafter.head import Head, Rows
from backend.drafter.proposer import MAX_DRAFT, MAX_OUTCOMES, Premise
from backend.protocol import Outcome

NEVER = float("-inf")
UNLIKELY = -30.0
"""Logarithm of the probability that a token outside the draft vocabulary is accepted: the head gives it none."""


@dataclass(frozen=True)
class Shape:
    """Sizes that all sequences of a batch are padded to: tokens verified, outcomes, tokens drafted for each."""

    depth: int
    width: int
    steps: int

    @classmethod
    def of(cls, batch: Many[Premise]) -> Shape:
        """The smallest that fits all."""
        return cls(
            max((len(premise.verifying) for premise in batch), default=0),
            max((min(premise.outcomes, MAX_OUTCOMES) for premise in batch), default=0),
            max((min(premise.k, MAX_DRAFT) for premise in batch), default=0),
        )

    @property
    def scratch(self) -> int:
        """Cache rows needed behind a sequence's last."""
        return self.depth + self.width * self.steps


@dataclass(frozen=True)
class _Branches:
    """The chosen outcomes, `[sequences, width]`: tokens accepted, the draft vocabulary's id after them, log-probability."""

    stops: Tensor
    tokens: Tensor
    scores: Tensor


class Imagination:
    """Enumerates outcomes with one head; keeps nothing between calls."""

    def __init__(self, head: Head, max_position: int) -> None:
        self._head = head
        self._max_position = max_position
        mapping = head.draft_to_target
        self._draft_ids = None if mapping is None else {target: own for own, target in enumerate(mapping.tolist())}
        self._draft_vocab = head.lm_head.shape[1]

    def outcomes(self, premises: list[Premise], sequences: list[Sequence], shape: Shape) -> list[list[Outcome]]:
        """The likeliest first.  Each sequence stands at its premise's length and has `shape.scratch` rows to spare."""
        outputs = self._force(premises, sequences, shape.depth)
        branches = self._choose(premises, outputs, shape)
        ids = self._head.target_ids(branches.tokens)
        drafted = self._branch(sequences, outputs, branches, ids, shape)
        found: list[list[Outcome]] = []
        packed = torch.cat((branches.stops.unsqueeze(-1), ids.unsqueeze(-1), drafted), dim=-1).tolist()
        for premise, rows, scores in zip(premises, packed, branches.scores.tolist(), strict=True):
            room = self._max_position - premise.base_len - 1
            found.append(
                [
                    Outcome(stop, token, tokens[: max(min(premise.k, room - stop), 0)])
                    for (stop, token, *tokens), score in zip(rows[: premise.outcomes], scores, strict=False)
                    if score > NEVER
                ]
            )
        return found

    def _force(self, premises: list[Premise], sequences: list[Sequence], depth: int) -> Tensor:
        """The head's outputs when made to draft what is being verified: `[sequences, depth + 1, hidden]`."""
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

    def _choose(self, premises: list[Premise], outputs: Tensor, shape: Shape) -> _Branches:
        """The most probable outcomes by the module's formula."""
        count, stops = len(premises), shape.depth + 1
        logits = self._head.logits(outputs.flatten(0, 1)).view(count, stops, -1)
        drafted = [self._own_ids(premise.verifying, stops) for premise in premises]
        limits = [[0.0 if k <= len(p.verifying) else NEVER for k in range(stops)] for p in premises]
        verified = torch.tensor(drafted, device=logits.device).unsqueeze(-1)
        totals = logits.logsumexp(-1, keepdim=True)
        accepted = (logits.gather(-1, verified.clamp(min=0)) - totals).masked_fill_(verified < 0, UNLIKELY)
        before = accepted.cumsum(1) - accepted + torch.tensor(limits, device=logits.device).unsqueeze(-1)
        # One more than can be chosen, since the verified token is not an outcome.
        best, tokens = logits.topk(min(shape.width + 1, self._draft_vocab), dim=-1)
        scores = (best - totals + before).masked_fill_(tokens == verified, NEVER).flatten(1)
        chosen, where = scores.topk(min(shape.width, scores.shape[1]), dim=-1)
        stop = torch.div(where, tokens.shape[-1], rounding_mode="floor")
        return _Branches(stop, tokens.flatten(1).gather(1, where), chosen)

    def _own_ids(self, verifying: list[int], count: int) -> list[int]:
        """Draft vocabulary ids, -1 where there is none, padded with it to `count`."""
        known = self._draft_ids
        own = [token if token < self._draft_vocab else -1 for token in verifying]
        if known is not None:
            own = [known.get(token, -1) for token in verifying]
        return own + [-1] * (count - len(own))

    def _branch(self, sequences: list[Sequence], outputs: Tensor, branches: _Branches, ids: Tensor, shape: Shape) -> Tensor:
        """Greedy drafts of all outcomes: `[sequences, width, steps]`.

        The rows of one step lie together, one per branch, behind those of the verified draft.
        """
        head, device = self._head, self._head.device
        count, width = ids.shape
        stride = torch.arange(count, device=device).unsqueeze(1) * (shape.depth + 1)
        feature = head.feature(outputs.flatten(0, 1).index_select(0, (stride + branches.stops).flatten()))
        last, places = steps_behind(sequences, shape.depth + 1, device)
        # Those beyond the last position are cut off later; they only have to stay within the table.
        positions = (last[0].unsqueeze(1) + branches.stops).flatten()
        furthest = len(head.rotations) - 1
        first = (places[-1].unsqueeze(1) + torch.arange(width, device=device)).flatten()
        starts, counts = [s.start for s in sequences], [width] * count
        masks = self._masks(sequences, branches.stops, shape)
        tokens, chosen = ids.flatten(), []
        for step in range(shape.steps):
            lengths = [s.length + shape.depth + (step + 1) * width for s in sequences]
            at = (positions + step).clamp_(max=furthest)
            rows = Rows(tokens, at, first + step * width, starts, lengths, counts, masks)
            tokens, feature = head.pick(head.forward(rows, feature, None))
            chosen.append(tokens)
        return torch.stack(chosen, dim=1).view(count, width, shape.steps)

    def _masks(self, sequences: list[Sequence], stops: Tensor, shape: Shape) -> list[Tensor]:
        """Per sequence, what its branches may see: all its rows, the drafted ones before the stop, and their own."""
        head, (count, width) = self._head, stops.shape
        drafted = torch.arange(shape.depth, device=head.device) < stops.unsqueeze(-1)
        own = torch.eye(width, dtype=torch.bool, device=head.device).repeat(1, shape.steps)
        visible = torch.cat((drafted, own.expand(count, -1, -1)), dim=-1)
        hidden = torch.zeros(visible.shape, dtype=head.dtype, device=head.device).masked_fill_(~visible, NEVER)
        folded = hidden.repeat_interleave(head.group, 1)
        return [functional.pad(mask, (s.length, 0)) for mask, s in zip(folded, sequences, strict=True)]


def tips(sequences: Many[Sequence]) -> Tensor:
    """The outputs that drafting starts from, `[sequences, hidden]`."""
    outputs = [sequence.tip[1] for sequence in sequences if sequence.tip is not None]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def steps_behind(sequences: Many[Sequence], steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions and places of the rows behind each sequence's last, `[steps, sequences]` each."""
    first = [[sequence.tip[0] - 1 if sequence.tip else 0 for sequence in sequences], [s.start + s.length for s in sequences]]
    packed = torch.tensor(first, device=device).unsqueeze(1) + torch.arange(steps, device=device).view(1, -1, 1)
    return packed[0], packed[1]
