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
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter import cache
from backend.drafter.attention import Reach
from backend.drafter.decoding import captured, columns_behind
from backend.drafter.draws import SAMPLING_COLUMNS, Draws, Ends, Picked, Rules, fresh_noise
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


NUMBERS = 6
"""Integers per block: latest token, its position, its place, start, number of masks, seed."""
SIZES = 1, 2, 4, 8, 16, 32, 64
"""Numbers of blocks for which passes are captured."""
MASKS = 4, 8, 16
"""Masks of a captured pass."""


class Blocks:
    """The state of `size` blocks of a latest token and `masks` mask tokens each.

    All lies in tensors that change in place, as in `decoding.Lanes`, so that on a GPU the pass is a CUDA graph.
    """

    def __init__(self, head: BlockHead, drafting: OnePassDrafting, size: int, masks: int, rules: Rules) -> None:
        device = head.device
        self._head, self._drafting, self._rules = head, drafting, rules
        self.masks = masks
        self._windows = sorted({window for window in drafting.windows if window})
        self._numbers = torch.empty(NUMBERS, size, dtype=torch.int64, device=device)
        self._tails = torch.zeros(len(self._windows), size, 1 + masks, dtype=torch.int64, device=device)
        self._columns = torch.empty(SAMPLING_COLUMNS, size, device=device)
        self._darts = torch.empty(size * masks, dtype=torch.float64, device=device)
        self._offsets = torch.arange(1 + masks, device=device)
        grid = torch.arange(size * (1 + masks), device=device).view(size, 1 + masks)
        self._keep = grid[:, 1:].flatten()
        self.picked: Picked | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._padding = torch.tensor([0, 0, head.capacity, head.capacity, 0, 0], device=device).unsqueeze(1)

    def load(self, sequences: list[cache.Sequence], masks: list[int], fresh: torch.Generator) -> None:
        """Begins anew, for these sequences and as many mask tokens each; blocks beyond them are padding."""
        count, device = len(sequences), self._head.device
        numbers = [
            [s.tokens[-1], len(s.tokens) - 1, s.start + s.length, s.start, own, s.sampling.seed]
            for s, own in zip(sequences, masks, strict=True)
        ]
        self._numbers[:] = self._padding
        self._numbers[:, :count] = torch.tensor(numbers, device=device).t()
        self._columns[:] = 1.0
        self._columns[:, :count] = columns_behind(sequences, device)
        self._darts.uniform_(generator=fresh)
        for tails, window in zip(self._tails, self._windows, strict=True):
            own_tails = [[_before(s, len(s.tokens) + j - window) for j in range(1 + self.masks)] for s in sequences]
            tails.zero_()
            tails[:count] = torch.tensor(own_tails, device=device)

    def capture(self, pool: Any) -> None:
        """Captures the pass; the blocks are padding meanwhile."""
        self._numbers[:] = self._padding
        self._columns[:] = 1.0
        self._darts.zero_()
        self.graph = captured(pool, self.compute)

    def run(self) -> Picked:
        """The tokens drawn for all masks, those of each block side by side."""
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()
        assert self.picked is not None
        return self.picked

    def compute(self) -> None:
        """The pass itself.  Masks beyond a block's own number are computed too, and seen by none of the others."""
        head, offsets, width = self._head, self._offsets, 1 + self.masks
        wide = self._numbers.unsqueeze(2).expand(-1, -1, width)
        tokens, positions, places, starts, masks, seeds = wide.unbind()
        ids = torch.where(offsets > 0, self._drafting.mask_token, tokens).flatten()
        places, starts, seeds = (places + offsets).flatten(), starts.flatten(), seeds[:, 1:].flatten()
        positions = positions + offsets
        # Where a mask stands before the others' end, those behind it are seen too, unless the layer is causal.
        last = places + (masks - offsets).clamp(min=0).flatten()
        zeros, ones = torch.zeros_like(places), torch.ones_like(places)
        tails = dict(zip(self._windows, self._tails.flatten(1), strict=True)) | {0: zeros}
        reaches = [
            Reach(places if causal else last, starts, zeros, tails[window], ones)
            for causal, window in zip(self._drafting.causal, self._drafting.windows, strict=True)
        ]
        rows = Rows(ids, positions.flatten(), reaches[0], (), places, reaches)
        output = head.forward(rows, None, self._keep)
        draws = Draws(seeds, self._columns.repeat_interleave(self.masks, 1), head.draft_to_target, self._rules)
        # The mask at a position draws the token with as many tokens before it.
        self.picked = draws.pick(head.read(output), positions[:, 1:].flatten(), self._darts)


class DFlashProposer(EagleProposer):
    """A DFlash head behind the `Proposer` protocol."""

    head_class = BlockHead
    _head: BlockHead

    def __init__(self, weights: HeadWeights, cache_tokens: int, device: str = "cpu", graphs: bool = True) -> None:
        # What the base class captures are single steps of a draft; here it has one.
        super().__init__(weights, cache_tokens, device, graphs=False)
        assert weights.config.block is not None, "a DFlash head has a block"
        self._block: OnePassDrafting = weights.config.block
        self.longest = min(self._block.longest or self.longest, self.longest)
        self._fresh = fresh_noise(self._head.device)
        self._captured: dict[tuple[int, int, bool], Blocks] = {}
        if graphs and self._head.is_asynchronous:
            with torch.inference_mode():
                self._capture()

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        return [[] for _ in batch]

    def _scratch(self, depth: int) -> int:
        return self._masks(depth) + 1 if depth else 0

    def _masks(self, depth: int) -> int:
        """Masks that a pass has for drafts of at most `depth` tokens."""
        return min((masks for _, masks, _ in self._captured if masks >= depth), default=depth)

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into its memory.
        for masks in sorted({min(masks, self.longest) for masks in MASKS}, reverse=True):
            for size in reversed(SIZES):
                for independent in (False, True):
                    blocks = Blocks(self._head, self._block, size, masks, Rules(independent=independent))
                    blocks.capture(pool)
                    self._captured[size, masks, independent] = blocks

    def _compute(self, numbers: Tensor, features: Tensor | None, stretches: list[Stretch]) -> Tensor:
        assert features is not None, "verifiers send features with every row"
        self._head.store(numbers[1], numbers[2], features)
        return features.new_empty(len(stretches), 0)

    def _decode(self, sequences: list[cache.Sequence], ends: Ends, depth: int) -> list[Drafted]:
        """Drafts for each sequence as many tokens as `ends` allows, in one pass."""
        rules, masks = Rules.of([s.sampling for s in sequences]), self._masks(depth)
        size = next((size for size in SIZES if size >= len(sequences)), 0)
        blocks = self._captured.get((size, masks, rules.independent))
        if blocks is None:
            blocks = Blocks(self._head, self._block, len(sequences), masks, rules)
        blocks.load(sequences, ends.kept, self._fresh)
        return _cut(blocks.run(), len(sequences), masks, ends)


def _before(sequence: cache.Sequence, position: int) -> int:
    """How many of a sequence's rows, and of those of the block behind them, lie before a position."""
    own = sum(min(max(position - first, 0), rows) for first, rows in sequence.spans)
    return own + max(position - (len(sequence.tokens) - 1), 0)


def _cut(picked: Picked, count: int, masks: int, ends: Ends) -> list[Drafted]:
    """The drafts of the first `count` blocks, of the tokens drawn for all masks."""
    tokens = picked.tokens.view(-1, masks)[:count].tolist()
    signs = torch.stack((picked.values, picked.leads), dim=1).view(-1, masks, 2)[:count].cpu()
    proposals = None
    if picked.ids is not None and picked.chances is not None:
        both = torch.stack((picked.ids.to(torch.int32), picked.chances.view(torch.int32)))
        proposals = both.view(2, -1, masks, both.shape[-1])[:, :count].transpose(0, 1).cpu().numpy()
    for own in signs.transpose(0, 1).tolist():
        if not ends.take(own):
            break
    return ends.cut(tokens, signs.flatten(1).tolist(), proposals)
