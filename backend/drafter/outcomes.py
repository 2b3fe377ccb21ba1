"""Enumerates likely outcomes of a verification, and drafts for each: drafting ahead with an EAGLE head.  Drafter thread.

While the target verifies `d[0..m-1]`, the head runs over these tokens, on features that it makes itself.  That yields its
distribution q_k at every position where the verification may stop.  An outcome (k, t) says that k tokens are accepted and t
comes after them.  With c_i the chance that d_i is accepted,

    P(k, t) = c_0 ... c_{k-1} (1 - c_k) r_k(t),    t != d_k for k < m, and without (1 - c_k) for k = m

where r_k is the distribution of the token that comes if d_k is rejected.  The noise is known.  So the tokens with the largest
values `log q_k + G` (greedy requests: `log q_k`) are the likeliest; a softmax over these values, without d_k's, estimates their
chances.  c comes from the verifier's weights (`backend/speculation/chances.py`).  A token of an independent draft was drawn
without that noise, so its chance comes from the shape of its distribution alone (`draws.py`).  The token after it is drawn with
the noise all the same.

The likeliest outcomes are the branches of one tree.  They share the sequence's rows and part of the rows of the draft under
verification, and are decoded together.  The tree's rows lie behind the sequence's last row and are not counted as its own; the
next true rows overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from backend import noise
from backend.drafter.cache import Sequence
from backend.drafter.decoding import DecodeBatch, Decoder, columns_behind, rows_behind, tips
from backend.drafter.draws import SHARED, Draws, Ends, Rules
from backend.drafter.head import Head
from backend.drafter.proposer import MAX_DRAFT, MAX_OUTCOMES, Premise
from backend.speculation.chances import CLIP
from backend.speculation.tokens import common_prefix
from backend.wire.drafting import Outcome

Table = npt.NDArray[np.int64]
NEVER = float("-inf")
UNLIKELY = -30.0
"""The value given to a token outside the draft vocabulary, for which the head has no probability."""
UNJUDGED = (1.0, 0.0, 2.0)
"""Weights if the verifier has sent none: the surer the head, the likelier is its draft accepted."""
LEAST_CHANCE = 1e-6
"""Judged chances are kept this far from 0 and 1, so that logarithms stay finite."""


@dataclass(frozen=True)
class Padding:
    """Sizes that all sequences of a batch are padded to: tokens under verification, outcomes, tokens drafted per outcome."""

    depth: int
    width: int
    steps: int

    @classmethod
    def of(cls, batch: Many[Premise]) -> Padding:
        """The smallest sizes that fit all of `batch`."""
        return cls(
            max((len(premise.verifying) for premise in batch), default=0),
            max((min(premise.outcomes, MAX_OUTCOMES) for premise in batch), default=0),
            max((min(premise.until.k, MAX_DRAFT) for premise in batch), default=0),
        )

    @property
    def scratch(self) -> int:
        """Cache rows needed behind a sequence's last."""
        return self.depth + self.width * self.steps


class _Branches(NamedTuple):
    """The chosen outcomes, `[sequences, width]` each: tokens accepted, the target's token after them, log-probability."""

    stops: Tensor
    tokens: Tensor
    scores: Tensor


class Imagination:
    """Enumerates outcomes with one head; what a call leaves to the next lies in the sequences."""

    def __init__(self, head: Head, decoder: Decoder, max_position: int) -> None:
        self._head, self._decoder = head, decoder
        self._max_position = max_position
        mapping = head.draft_to_target
        self._draft_ids = None if mapping is None else {target: own for own, target in enumerate(mapping.tolist())}
        self._draft_vocab = head.lm_head.shape[1]

    def outcomes(self, premises: list[Premise], sequences: list[Sequence], shape: Padding) -> list[list[Outcome]]:
        """Outcomes with drafts, likeliest first.  Sequences need their premise's length, and `shape.scratch` spare rows."""
        device = self._head.device
        samplings, untils = [s.sampling for s in sequences], [p.until for p in premises]
        rules = Rules.needed_by(samplings)
        rows, columns = rows_behind(sequences, self._head), columns_behind(sequences, device)
        outputs = self._teacher_forced(premises, sequences, rows, columns, shape.depth)
        seeds, wide = (each.repeat_interleave(shape.depth + 1, -1) for each in (rows[-1], columns))
        draws = Draws(seeds, wide, self._head.draft_to_target, rules)
        branches = self._choose(premises, sequences, outputs, draws, shape)
        width = branches.stops.shape[1]
        batch = self._branch(rules, rows, columns, outputs, branches, shape)
        read: Callable[[], list[Any]] = cache(lambda: [each.numpy(force=True) for each in branches])
        drafted = batch.decode(shape.steps, lambda: Ends(self._limits(premises, *read()), untils, samplings), picks_first=False)
        stopped, tokens, scores = (each.tolist() for each in read())
        found = [
            [
                Outcome(stopped[i][at], tokens[i][at], (draft := drafted[i * width + at]).tokens, draft.signs, draft.proposal)
                for at in range(min(premise.outcomes, width))
                if scores[i][at] > NEVER
            ]
            for i, premise in enumerate(premises)
        ]
        for sequence, own, outputs in zip(sequences, found, torch.split(batch.outputs_of(batch.taken - 1), width), strict=True):
            sequence.imagined = len(sequence.tokens), own, outputs
        return found

    def _teacher_forced(
        self, premises: list[Premise], sequences: list[Sequence], rows: Tensor, columns: Tensor, depth: int
    ) -> Tensor:
        """The head's outputs when it is fed the draft under verification: `[sequences, depth + 1, hidden]`.

        Those of a fresh draft that this drafter has just made are still there.  A draft for an outcome has left outputs made on
        guessed features: with these as features, one pass over all its tokens makes better ones.  Otherwise each token takes a
        pass.
        """
        found = [tips(sequences).unsqueeze(1)]
        known = min(_known(p.verifying, s, depth) for p, s in zip(premises, sequences, strict=True))
        guessed = self._guessed(premises, sequences, depth) if known < depth - 1 else None
        if guessed is not None:
            found.append(self._in_one_pass(premises, rows, torch.cat((found[0], guessed), dim=1)))
        else:
            if known:
                nothing, own = found[0].new_zeros(known, found[0].shape[-1]), zip(premises, sequences, strict=True)
                found.append(torch.stack([s.drafted[2][:known] if p.verifying and s.drafted else nothing for p, s in own]))
            if known < depth:
                tokens = _padded(premises, depth, rows.device)[:, known:]
                begin = torch.tensor([0, known, known, 0, 0, 0, 0, 0], device=rows.device).unsqueeze(1)
                batch = self._decoder.batch(depth - known, SHARED, rows + begin, columns, found[-1][:, -1])
                found.append(batch.forced(tokens))
        for sequence in sequences:
            sequence.drafted = None
        return torch.cat(found, dim=1)

    def _guessed(self, premises: list[Premise], sequences: list[Sequence], depth: int) -> Tensor | None:
        """Outputs that earlier drafts left after each token under verification but the last: `[sequences, depth - 1, hidden]`.

        None: some are missing.  A draft model takes no features, and needs none.
        """
        head = self._head
        if not head.takes_features:
            return torch.zeros(len(premises), depth - 1, head.config.hidden_size, dtype=head.dtype, device=head.device)
        found = []
        for premise, sequence in zip(premises, sequences, strict=True):
            needed = max(len(premise.verifying) - 1, 0)
            outputs = _left(premise.verifying, sequence) if needed else tips([sequence])[:0]
            if outputs is None or len(outputs) < needed:
                return None
            found.append(functional.pad(outputs[:needed], (0, 0, 0, depth - 1 - needed)))
        return torch.stack(found)

    def _in_one_pass(self, premises: list[Premise], rows: Tensor, features: Tensor) -> Tensor:
        """Outputs after all tokens under verification, on `features` `[sequences, depth, hidden]`; shaped as these."""
        depth = features.shape[1]
        numbers = rows.unsqueeze(2).repeat(1, 1, depth)
        numbers[0] = _padded(premises, depth, rows.device)
        numbers[1:3] += torch.arange(depth, device=rows.device)
        outputs = self._decoder.extend(numbers.flatten(1), self._head.feature(features.flatten(0, 1)), None)
        return outputs.view(features.shape)

    def _limits(self, premises: list[Premise], stops: Table, tokens: Table, scores: npt.NDArray[np.float32]) -> Table:
        """One limit per branch: 0 for padding beyond the outcomes asked for, and for impossible outcomes."""
        given = [[p.outcomes, min(p.until.k, MAX_DRAFT), self._max_position - p.base_len - 1] for p in premises]
        wanted, longest, room = np.array(given).T[..., None]
        limits: Table = np.minimum(longest, room - stops) * (scores > NEVER) * (np.arange(stops.shape[1]) < wanted)
        return limits.ravel()

    def _choose(
        self, premises: list[Premise], sequences: list[Sequence], outputs: Tensor, draws: Draws, shape: Padding
    ) -> _Branches:
        """The most probable outcomes, by the module's formula.  Tensors begin with `[sequences, stops]`."""
        device, count, stops = self._head.device, len(premises), shape.depth + 1
        logits = self._head.read(outputs.flatten(0, 1))
        first = [[p.base_len, len(p.verifying), *self._own_ids(p.verifying, stops)] for p in premises]
        given = torch.tensor(first, device=device)
        stop = torch.arange(stops, device=device)
        begins, lengths, drafted = given[:, :1], given[:, 1:2], given[:, 2:]
        at = torch.where(draws.independent.view(count, stops), noise.behind(begins, stop), begins + stop)
        # One token more than can be chosen, since the verified token is no outcome.
        size = min(max(shape.width, 1) + 1, self._draft_vocab)
        columns, values, verified = draws.survey(logits, at.flatten(), size, drafted.clamp(min=0).flatten())
        columns, values = columns.view(count, stops, size), values.view(count, stops, size)
        # At the last stop there is no token to accept.
        verified = verified.view(count, stops).masked_fill(drafted < 0, UNLIKELY).masked_fill(stop >= lengths, NEVER)
        others = values.masked_fill(columns == drafted.unsqueeze(-1), NEVER)
        shapes = draws.shapes(logits)
        accepted, ended = self._fates(draws, verified, others, shapes, self._weights(premises, sequences, stops))
        before = (accepted.cumsum(1) - accepted).masked_fill(stop > lengths, NEVER)
        scores = (others + (before + ended).unsqueeze(-1)).flatten(1)
        chosen, where = scores.topk(min(shape.width, scores.shape[1]), dim=-1)
        tokens = draws.tokens_of(columns.flatten(1).gather(1, where))
        return _Branches(torch.div(where, size, rounding_mode="floor"), tokens, chosen)

    def _weights(self, premises: list[Premise], sequences: list[Sequence], stops: int) -> Tensor:
        """The weights by which each sequence's tokens are judged: `a`, `b` and e of each stop."""
        rows = []
        for premise, sequence in zip(premises, sequences, strict=True):
            a, b, *offsets = premise.until.judge(sequence.sampling) or UNJUDGED
            rows.append([a, b, *offsets[:stops], *offsets[-1:] * (stops - len(offsets))])
        return torch.tensor(rows, dtype=torch.float32, device=self._head.device)

    @staticmethod
    def _fates(draws: Draws, verified: Tensor, others: Tensor, shapes: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of each verified token's chance, and of a factor: `[sequences, stops]` each.

        The factor times exp(value) is the chance that a verification which gets here ends with the token of that value.
        `shapes`: the signs at all stops, for sequences with independent drafts.
        """
        rest = others.logsumexp(-1).clamp(min=torch.finfo(torch.float32).min)
        leads = verified - others[..., 0].maximum(others[..., min(1, others.shape[-1] - 1)])
        signs = torch.stack((verified, leads), dim=-1)
        if shapes is not None:
            signs = torch.where(draws.independent.view(*verified.shape, 1), shapes.view(signs.shape), signs)
        # `chances` in `speculation/chances.py`, for all at once.
        signs = signs.nan_to_num(nan=-CLIP).clamp(-CLIP, CLIP)
        judged = (weights[:, :1] * signs[..., 0] + weights[:, 1:2] * signs[..., 1] + weights[:, 2:]).sigmoid()
        judged = judged.clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
        # At the last stop no token is verified: its chance must not count.
        is_last = verified == NEVER
        return judged.log().masked_fill(is_last, 0.0), torch.log1p(-judged).masked_fill(is_last, 0.0) - rest

    def _own_ids(self, verifying: list[int], count: int) -> list[int]:
        """The tokens' ids in the draft vocabulary, -1 for tokens outside it; padded with -1 to `count`."""
        known = self._draft_ids
        own = [token if token < self._draft_vocab else -1 for token in verifying]
        if known is not None:
            own = [known.get(token, -1) for token in verifying]
        return own + [-1] * (count - len(own))

    def _branch(
        self, rules: Rules, rows: Tensor, columns: Tensor, outputs: Tensor, branches: _Branches, shape: Padding
    ) -> DecodeBatch:
        """A decode batch for all outcomes, `width` per sequence.

        In the cache, the rows of the draft under verification come first, then for each step one row per branch.
        """
        count, width = branches.tokens.shape
        stride = torch.arange(count, device=outputs.device).unsqueeze(1) * (shape.depth + 1)
        output = outputs.flatten(0, 1).index_select(0, (stride + branches.stops).flatten())
        _, positions, places, starts, _, _, ones, seeds = rows.unsqueeze(2).expand(-1, -1, width)
        tails = places - starts + shape.depth
        own = places + shape.depth + torch.arange(width, device=outputs.device)
        numbers = (
            branches.tokens,
            positions + branches.stops,
            own,
            starts,
            tails - shape.depth + branches.stops,
            tails,
            ones * width,
            seeds,
        )
        wide = columns.repeat_interleave(width, 1)
        return self._decoder.batch(shape.steps, rules, torch.stack(numbers).flatten(1), wide, output)


def _padded(premises: list[Premise], depth: int, device: torch.device) -> Tensor:
    """The tokens under verification, `[sequences, depth]`."""
    return torch.tensor([[*premise.verifying, *[0] * (depth - len(premise.verifying))] for premise in premises], device=device)


def _left(verifying: list[int], sequence: Sequence) -> Tensor | None:
    """The outputs `[n, hidden]` that drafting the leading n tokens under verification has left, if this drafter has."""
    if sequence.drafted is not None:
        _, tokens, outputs = sequence.drafted
        return outputs[: common_prefix(verifying, tokens)]
    if sequence.imagined is not None:
        base_len, outcomes, left = sequence.imagined
        came = len(sequence.tokens) - base_len - 1, sequence.tokens[-1]
        for place, outcome in enumerate(outcomes):
            if (outcome.accepted, outcome.token) == came:
                return left[place][: common_prefix(verifying, outcome.tokens)]
    return None


def _known(verifying: list[int], sequence: Sequence, depth: int) -> int:
    """Of how many of the tokens under verification the sequence's latest draft has left outputs and rows.

    What is behind a draft's end is never looked at.
    """
    if not verifying:
        return depth
    if sequence.drafted is None:
        return 0
    start, tokens, outputs = sequence.drafted
    known = min(common_prefix(verifying, tokens), len(outputs)) if start == sequence.start else 0
    return depth if known == len(verifying) and len(outputs) >= depth else known
