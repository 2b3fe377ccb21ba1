"""Proposes with a DFlash or DSpark head: all tokens of a draft in one pass.  Drafter thread.

A row of the cache holds keys and values of all layers, made from the target's feature at its position alone.  A draft is one
pass over a block: the latest token, and mask tokens behind it.  The block's rows see the sequence's rows and each other, in
causal layers only earlier ones.  The block's own rows lie behind the sequence's last row, and the next true rows overwrite
them.

What the rows draw depends on the head: each mask the token in its place, or each row, the latest token's too, the token behind
it (`OnePassDrafting.anchored`).  A DFlash head's distributions do not depend on the tokens drawn from them.  A DSpark head has
a Markov head besides, by which each token drawn adds to the scores of the next one: two small products per token.

There is nothing to go on from behind a draft whose features have not come, so no outcomes are drafted ahead.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter import cache
from backend.drafter.attention import Reach
from backend.drafter.decoding import captured, columns_behind
from backend.drafter.draws import CAPTURED, SAMPLING_COLUMNS, Draws, Ends, Picked, Rules, fresh_noise
from backend.drafter.eagle import EagleProposer
from backend.drafter.head import Head, Rows, Stretch, affine, rotate_pairs
from backend.drafter.proposer import Drafted, Premise
from backend.models.checkpoint import HeadWeights
from backend.models.head_config import OnePassDrafting
from backend.models.layout import MARKOV_IN, MARKOV_OUT
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
        self.has_markov = MARKOV_IN in weights.tensors
        if self.has_markov:
            self._markov_in = self._on_device(weights.tensors[MARKOV_IN])
            # The vocabulary may be padded.
            self._markov_out = self._on_device(weights.tensors[MARKOV_OUT][: self.config.draft_vocab_size].t())

    def store(self, positions: Tensor, places: Tensor, features: Tensor) -> None:
        """Writes the rows made from `features` `[rows, hidden]`, at `positions`, into the cache at `places`."""
        made = affine(self._rms(features, self._context_norm), self._context, self._context_bias)
        keys, values = made.view(len(made), len(self.layers), 2, self.kv_heads, self.head_dim).unbind(2)
        keys = functional.rms_norm(keys, (self.head_dim,), None, self.config.rms_norm_eps) * self._key_norms
        rotate_pairs(keys.flatten(1, 2), self._rotations_at(positions))
        self.cache.index_copy_(1, places, torch.stack((keys, values), dim=2).flatten(2).transpose(0, 1))

    def markov(self, tokens: Tensor) -> Tensor:
        """What `tokens` `[rows]` add to the logits of the tokens behind them, `[rows, draft vocabulary]` in float32."""
        return (self._markov_in.index_select(0, tokens) @ self._markov_out).float()


NUMBERS = 6
"""Integers per block: latest token, its position, its place, start, place of its last row, seed."""
SIZES = 1, 2, 4, 8, 16, 32, 64
"""Numbers of blocks for which passes are captured."""
DEPTHS = 4, 8, 16
"""Tokens per draft of a captured pass."""


class Blocks:
    """The state of `size` blocks, by which `depth` tokens each are drafted.

    All lies in tensors that change in place, as in `decoding.DecodeBatch`, so that on a GPU the pass is a CUDA graph.
    """

    def __init__(self, head: BlockHead, drafting: OnePassDrafting, size: int, depth: int, rules: Rules) -> None:
        device = head.device
        self._head, self._drafting, self._rules = head, drafting, rules
        self._depth = depth
        self._width = width = rows_of(drafting, depth)
        self._windows = sorted({window for window in drafting.windows if window})
        self._numbers = torch.empty(NUMBERS, size, dtype=torch.int64, device=device)
        self._tails = torch.zeros(len(self._windows), size, width, dtype=torch.int64, device=device)
        self._columns = torch.empty(SAMPLING_COLUMNS, size, device=device)
        self._darts = torch.empty(size, depth, dtype=torch.float64, device=device)
        self._offsets = torch.arange(width, device=device)
        self._ahead = torch.arange(1, 1 + depth, device=device)
        grid = torch.arange(size * width, device=device).view(size, width)
        self._keep = grid[:, width - depth :].flatten()
        self.picked: Picked | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._padding = torch.tensor([0, 0, head.capacity, head.capacity, head.capacity, 0], device=device).unsqueeze(1)

    def load(self, sequences: list[cache.Sequence], depths: list[int], fresh: torch.Generator) -> None:
        """Begins anew, to draft as many tokens for each of these sequences; blocks beyond them are padding."""
        count, device = len(sequences), self._head.device
        numbers = []
        for s, depth in zip(sequences, depths, strict=True):
            place = s.start + s.length
            last = place + rows_of(self._drafting, depth) - 1
            numbers.append([s.tokens[-1], len(s.tokens) - 1, place, s.start, last, s.sampling.seed])
        self._numbers[:] = self._padding
        self._numbers[:, :count] = torch.tensor(numbers, device=device).t()
        self._columns[:] = 1.0
        self._columns[:, :count] = columns_behind(sequences, device)
        self._darts.uniform_(generator=fresh)
        for tails, window in zip(self._tails, self._windows, strict=True):
            own_tails = [[_before(s, len(s.tokens) + j - window) for j in range(self._width)] for s in sequences]
            tails.zero_()
            tails[:count] = torch.tensor(own_tails, device=device)

    def capture(self, pool: Any) -> None:
        """Captures the pass; the blocks are padding meanwhile."""
        self._numbers[:] = self._padding
        self._columns[:] = 1.0
        self._darts.zero_()
        self.graph = captured(pool, self.compute)

    def run(self) -> Picked:
        """The tokens drawn in all places, `[blocks, depth]`, and what comes with each."""
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()
        assert self.picked is not None
        return self.picked

    def compute(self) -> None:
        """The pass itself.  Rows beyond a block's own number are computed too, and seen by none of the others."""
        head, offsets = self._head, self._offsets
        wide = self._numbers.unsqueeze(2).expand(-1, -1, self._width)
        tokens, positions, places, starts, ends, _ = wide.unbind()
        ids = torch.where(offsets > 0, self._drafting.mask_token, tokens).flatten()
        places, starts = (places + offsets).flatten(), starts.flatten()
        # A row sees those behind it up to the block's end, too, unless the layer is causal.
        last = torch.maximum(places, ends.flatten())
        zeros, ones = torch.zeros_like(places), torch.ones_like(places)
        tails = dict(zip(self._windows, self._tails.flatten(1), strict=True)) | {0: zeros}
        reaches = [
            Reach(places if causal else last, starts, zeros, tails[window], ones)
            for causal, window in zip(self._drafting.causal, self._drafting.windows, strict=True)
        ]
        rows = Rows(ids, (positions + offsets).flatten(), reaches[0], (), places, reaches)
        self.picked = self._pick(head.read(head.forward(rows, None, self._keep)))

    def _pick(self, logits: Tensor) -> Picked:
        """Draws all tokens from `logits` `[blocks * depth, draft vocabulary]`."""
        head, (tokens, positions, _, _, _, seeds) = self._head, self._numbers.unbind()
        # A token is drawn at the position that has as many tokens before it.
        wide = positions.unsqueeze(1) + self._ahead
        if not head.has_markov:
            columns, seeds = self._columns.repeat_interleave(self._depth, 1), seeds.repeat_interleave(self._depth)
            draws = Draws(seeds, columns, head.draft_to_target, self._rules)
            picked = draws.pick(logits, wide.flatten(), self._darts.flatten())
            return Picked._make(None if part is None else part.view(*wide.shape, *part.shape[1:]) for part in picked)
        draws = Draws(seeds, self._columns, head.draft_to_target, self._rules)
        drawn: list[Picked] = []
        for place, own in enumerate(logits.view(*wide.shape, -1).unbind(1)):
            drawn.append(draws.pick(own + head.markov(tokens), wide[:, place], self._darts[:, place]))
            tokens = drawn[-1].tokens
        return Picked._make(None if parts[0] is None else torch.stack(parts, 1) for parts in zip(*drawn, strict=True))


def rows_of(drafting: OnePassDrafting, depth: int) -> int:
    """Rows of a block by which `depth` tokens are drafted."""
    return depth if drafting.anchored else 1 + depth


class DFlashProposer(EagleProposer):
    """A DFlash or DSpark head behind the `Proposer` protocol."""

    head_class = BlockHead
    _head: BlockHead

    def __init__(self, weights: HeadWeights, cache_tokens: int, device: str = "cpu", graphs: bool = True) -> None:
        # What the base class captures are single steps of a draft; here it has one.
        super().__init__(weights, cache_tokens, device, graphs=False)
        assert weights.config.block is not None, "such a head has a block"
        self._block: OnePassDrafting = weights.config.block
        self.longest = min(self._block.longest or self.longest, self.longest)
        self._fresh = fresh_noise(self._head.device)
        self._captured: dict[tuple[int, int, Rules], Blocks] = {}
        if graphs and self._head.is_asynchronous:
            with torch.inference_mode():
                self._capture()

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        return [[] for _ in batch]

    def _scratch_rows(self, depth: int) -> int:
        return rows_of(self._block, self._depth(depth)) if depth else 0

    def _depth(self, depth: int) -> int:
        """Tokens per draft of the pass that makes drafts of at most `depth` tokens."""
        return min((captured for _, captured, _ in self._captured if captured >= depth), default=depth)

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into its memory.
        for depth in sorted({min(depth, self.longest) for depth in DEPTHS}, reverse=True):
            for size, rules in product(reversed(SIZES), CAPTURED):
                blocks = Blocks(self._head, self._block, size, depth, rules)
                blocks.capture(pool)
                if blocks.graph is None:
                    self._captured.clear()
                    return
                self._captured[size, depth, rules] = blocks

    def _compute(self, numbers: Tensor, features: Tensor | None, stretches: list[Stretch]) -> Tensor:
        assert features is not None, "verifiers send features with every row"
        self._head.store(numbers[1], numbers[2], features)
        return features.new_empty(len(stretches), 0)

    def _decode(self, sequences: list[cache.Sequence], ends: Ends, depth: int) -> list[Drafted]:
        """Drafts for each sequence as many tokens as `ends` allows, in one pass."""
        rules, depth = Rules.needed_by([s.sampling for s in sequences]), self._depth(depth)
        size = next((size for size in SIZES if size >= len(sequences)), 0)
        blocks = self._captured.get((size, depth, rules.captured()))
        if blocks is None:
            blocks = Blocks(self._head, self._block, len(sequences), depth, rules)
        blocks.load(sequences, ends.kept.tolist(), self._fresh)
        return _cut(blocks.run(), len(sequences), ends)


def _before(sequence: cache.Sequence, position: int) -> int:
    """How many of a sequence's rows, and of those of the block behind them, lie before a position."""
    own = sum(min(max(position - first, 0), rows) for first, rows in sequence.spans)
    return own + max(position - (len(sequence.tokens) - 1), 0)


def _cut(picked: Picked, count: int, ends: Ends) -> list[Drafted]:
    """The drafts of the first `count` blocks, of the tokens drawn in all places."""
    signs = torch.stack((picked.values, picked.leads), dim=2)[:count].cpu()
    proposals = None
    if picked.ids is not None and picked.chances is not None:
        both = torch.stack((picked.ids[:count].to(torch.int32), picked.chances[:count].view(torch.int32)), dim=1)
        proposals = both.cpu().numpy()
    ends.take(signs.permute(2, 1, 0).numpy())
    return ends.cut(picked.tokens[:count].tolist(), signs.flatten(1).tolist(), proposals)
