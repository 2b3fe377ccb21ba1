"""Proposes with a DFlash head: all tokens of a draft in one pass.  Drafter thread.

A row of the cache holds keys and values of all layers, made from the target's feature at its position alone.  A draft is one
pass over a block: the latest token, and a mask token for each token to draft.  The block's rows see the sequence's rows and
each other, in causal layers only earlier ones; each mask's output is the distribution in its place.  The block's own rows lie
behind the sequence's last row, and the next true rows overwrite them.

The distributions of one pass do not depend on the tokens drawn from them.  There is nothing to go on from behind a draft whose
features have not come, so no outcomes are drafted ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter import cache
from backend.drafter.attention import Reach
from backend.drafter.decoding import columns_behind
from backend.drafter.draws import Draws, Ends, Picked, Rules, fresh_noise
from backend.drafter.eagle import EagleProposer
from backend.drafter.head import Head, Rows, Stretch, affine, rotate_pairs
from backend.drafter.proposer import Drafted, Premise
from backend.models.checkpoint import HeadWeights
from backend.models.head_config import OnePassDrafting
from backend.wire.drafting import Outcome


class BlockHead(Head):
    """The network: `forward` computes blocks, `store` the rows of the target's features."""

    def __init__(self, weights: HeadWeights, device: torch.device, dtype: torch.dtype, capacity: int, positions: int) -> None:
        super().__init__(weights, device, dtype, capacity, positions)
        self._context_norm = self._on_device(weights.tensors["hidden_norm.weight"])
        self._context = torch.cat([layer.qkv[:, self.query_width :] for layer in self.layers], dim=1)
        biases = [layer.qkv_bias[self.query_width :] for layer in self.layers if layer.qkv_bias is not None]
        self._context_bias = torch.cat(biases) if biases else None
        self._key_norms = torch.stack([layer.k_norm for layer in self.layers if layer.k_norm is not None]).unsqueeze(1)

    def store(self, positions: Tensor, places: Tensor, features: Tensor) -> None:
        """Writes the rows made from `features` `[rows, hidden]`, at `positions`, into the cache at `places`."""
        made = affine(self._rms(features, self._context_norm), self._context, self._context_bias)
        keys, values = made.view(len(made), len(self.layers), 2, self.kv_heads, self.head_dim).unbind(2)
        keys = functional.rms_norm(keys, (self.head_dim,), None, self.config.rms_norm_eps) * self._key_norms
        rotate_pairs(keys.flatten(1, 2), self._rotations_at(positions))
        self.cache.index_copy_(1, places, torch.stack((keys, values), dim=2).flatten(2).transpose(0, 1))


class DFlashProposer(EagleProposer):
    """A DFlash head behind the `Proposer` protocol."""

    head_class = BlockHead
    _head: BlockHead

    def __init__(self, weights: HeadWeights, cache_tokens: int, device: str = "cpu", graphs: bool = True) -> None:
        # Graphs would replay single steps of a draft; here it has one.
        super().__init__(weights, cache_tokens, device, graphs=False)
        assert weights.config.block is not None, "a DFlash head has a block"
        self._block: OnePassDrafting = weights.config.block
        self.longest = min(self._block.longest or self.longest, self.longest)
        self._fresh = fresh_noise(self._head.device)

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        return [[] for _ in batch]

    def _scratch(self, depth: int) -> int:
        return depth + 1 if depth else 0

    def _compute(self, numbers: Tensor, features: Tensor | None, stretches: list[Stretch]) -> Tensor:
        assert features is not None, "verifiers send features with every row"
        self._head.store(numbers[1], numbers[2], features)
        return features.new_empty(len(stretches), 0)

    def _decode(self, sequences: list[cache.Sequence], ends: Ends, depth: int) -> list[Drafted]:
        """Drafts for each sequence as many tokens as `ends` allows, in one pass."""
        head, masks = self._head, list(ends.kept)
        blocks = [range(1 + count) for count in masks]
        rows = [
            [
                self._block.mask_token if j else s.tokens[-1],
                len(s.tokens) - 1 + j,
                s.start + s.length + j,
                s.start,
                block[-1] - j,
            ]
            for s, block in zip(sequences, blocks, strict=True)
            for j in block
        ]
        numbers = torch.tensor(rows, device=head.device).t().contiguous()
        keep = torch.tensor([j > 0 for block in blocks for j in block], device=head.device).nonzero().squeeze(1)
        reaches = self._reaches(sequences, blocks, *numbers[2:])
        output = head.forward(Rows(numbers[0], numbers[1], reaches[0], (), numbers[2], reaches), None, keep)
        rules, counts = Rules.of([s.sampling for s in sequences]), torch.tensor(masks, device=head.device)
        seeds = torch.tensor([s.sampling.seed for s in sequences], device=head.device).repeat_interleave(counts)
        draws = Draws(seeds, columns_behind(sequences, head.device).repeat_interleave(counts, 1), head.draft_to_target, rules)
        darts = torch.rand(len(keep), dtype=torch.float64, device=head.device, generator=self._fresh)
        # The mask at a position draws the token with as many tokens before it.
        return _cut(draws.pick(head.read(output), numbers[1][keep], darts), masks, ends)

    def _reaches(
        self, sequences: list[cache.Sequence], blocks: list[range], places: Tensor, starts: Tensor, behind: Tensor
    ) -> list[Reach]:
        """What the blocks' rows see in each layer; `behind`: how many rows of its block follow each row."""
        zeros, ones = torch.zeros_like(places), torch.ones_like(places)
        found: dict[tuple[bool, int], Reach] = {}
        kinds = list(zip(self._block.causal, self._block.windows, strict=True))
        for causal, window in set(kinds):
            tails = zeros
            if window:
                first = [
                    _before(s, len(s.tokens) + j - window) for s, block in zip(sequences, blocks, strict=True) for j in block
                ]
                tails = torch.tensor(first, device=places.device)
            found[causal, window] = Reach(places if causal else places + behind, starts, zeros, tails, ones)
        return [found[kind] for kind in kinds]


def _before(sequence: cache.Sequence, position: int) -> int:
    """How many of a sequence's rows, and of those of the block behind them, lie before a position."""
    own = sum(min(max(position - first, 0), rows) for first, rows in sequence.spans)
    return own + max(position - (len(sequence.tokens) - 1), 0)


def _cut(picked: Picked, masks: list[int], ends: Ends) -> list[Drafted]:
    """The drafts, of tokens drawn for all masks; shorter ones are padded."""
    where = np.arange(max(masks)) < np.array(masks)[:, None]
    tokens: npt.NDArray[np.int64] = np.zeros(where.shape, np.int64)
    signs: npt.NDArray[np.float32] = np.zeros((*where.shape, 2), np.float32)
    tokens[where] = picked.tokens.cpu().numpy()
    signs[where] = torch.stack((picked.values, picked.leads), dim=1).cpu().numpy()
    proposals = None
    if picked.ids is not None and picked.chances is not None:
        proposals = np.zeros((*where.shape, 2, picked.ids.shape[1]), np.int32)
        proposals[where] = torch.stack((picked.ids.to(torch.int32), picked.chances.view(torch.int32)), dim=1).cpu().numpy()
        proposals = proposals.swapaxes(1, 2)
    for place in range(where.shape[1]):
        if not ends.take(signs[:, place].tolist()):
            break
    return ends.cut(tokens.tolist(), signs.reshape(len(masks), -1).tolist(), proposals)
