"""Proposes with an EAGLE head: extends the cache by the target's true features, then decodes K tokens greedily.

Drafter thread.  Both halves are batched over the sequences of a round, whichever verifier they come from.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from backend.drafter import cache
from backend.drafter.checkpoint import HeadWeights
from backend.drafter.head import Head, Rows, last_rows
from backend.drafter.outcomes import Imagination, Shape, steps_behind, tips
from backend.drafter.proposer import MAX_DRAFT, Ask, Premise, Usage
from backend.protocol import Outcome

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CPU_BATCH_OUTCOMES = 64
"""From here on a core's matrix products gain little from more rows."""
GPU_BATCH_OUTCOMES = 2048


def choose_dtype(asked: str, stored: str, device: torch.device) -> torch.dtype:
    """`auto`: the head's own type; on a CPU float32, which is faster there and never worse."""
    if asked != "auto":
        return DTYPES[asked]
    return torch.float32 if device.type == "cpu" else DTYPES.get(stored, torch.float32)


class EagleProposer:
    """An EAGLE head behind the `Proposer` protocol."""

    def __init__(
        self,
        weights: HeadWeights,
        cache_tokens: int,
        device: str = "cpu",
        dtype: str = "auto",
        gather: bool | None = None,
    ) -> None:
        config = weights.config
        self.kind: str = config.kind
        self.hidden = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_position = weights.max_position
        where = torch.device(device)
        self.batch_outcomes = CPU_BATCH_OUTCOMES if where.type == "cpu" else GPU_BATCH_OUTCOMES
        self._cache = cache.RowCache(cache_tokens, self._move)
        with torch.inference_mode():
            self._head = Head(
                weights,
                where,
                choose_dtype(dtype, config.dtype, where),
                self._cache.capacity,
                # Rows of a batch go on drafting past their own end while others are not done.
                self.max_position + MAX_DRAFT,
                gather,
            )
        self._imagination = Imagination(self._head, self.max_position)

    def _move(self, source: int, target: int, rows: int) -> None:
        self._head.move(source, target, rows)

    def open(self, key: Hashable, tokens: list[int], rows: int, now: float) -> None:
        """Starts a sequence; rows of an earlier one with the same prefix are reused up to its own features."""
        self._cache.open(key, tokens, len(tokens) - 1 - rows, now)

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int, now: float) -> bool:
        """Takes the newest tokens."""
        sequence = self._cache.get(key, now)
        if sequence is None:
            return False
        # A request that is computed anew after a preemption repeats itself, and that takes nothing back.
        if rows or tokens or base_len > len(sequence.tokens):
            self._cache.extend_tokens(sequence, base_len, tokens)
            sequence.tip = None if tokens else sequence.tip
        return True

    def close(self, key: Hashable) -> None:
        """Ends a sequence; its rows stay for reuse."""
        self._cache.close(key)

    def length(self, key: Hashable) -> int | None:
        """Tokens a sequence is known to have."""
        sequence = self._cache.peek(key)
        return None if sequence is None else len(sequence.tokens)

    def requests(self) -> list[Hashable]:
        """Open requests."""
        return self._cache.open_keys()

    def close_idle(self, before: float) -> None:
        """Closes sequences unheard of since `before`."""
        for key in self._cache.idle_since(before):
            self._cache.close(key)

    def invalidate(self) -> None:
        """Rows made from the target's earlier features serve no further sequence."""
        self._cache.invalidate()

    def usage(self) -> Usage:
        """Counters and load."""
        held = self._cache
        return Usage(len(held), held.usage, held.prefix_rows_reused, held.evictions)

    @torch.inference_mode()
    def draft(self, batch: Sequence[Ask]) -> list[list[int]]:
        """Extends all sequences in one pass, then decodes those that want drafts, together."""
        limits = [max(min(ask.k, MAX_DRAFT, self.max_position - ask.base_len), 0) for ask in batch]
        depth = max(limits, default=0)
        extended, drafting = self._reserve(batch, limits, max(depth - 1, 0))
        if extended:
            self._extend(batch, extended)
        drafts: list[list[int]] = [[] for _ in batch]
        if drafting:
            for i, tokens in zip(drafting, self._decode(list(drafting.values()), depth), strict=True):
                drafts[i] = tokens[: limits[i]]
        return drafts

    @torch.inference_mode()
    def imagine(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        """Drafts for likely ends of verifications; the rows it computes lie where the next true ones will be written."""
        likely = Shape.of(batch)
        chosen: dict[int, cache.Sequence] = {}
        for i, premise in enumerate(batch):
            sequence = self._cache.peek(premise.key)
            if sequence is None or not _is_at(sequence, premise.base_len):
                continue
            wanted = premise.verifying and premise.outcomes > 0 and premise.k > 0
            if wanted and self._cache.spare(sequence, likely.scratch):
                chosen[i] = sequence
        found: list[list[Outcome]] = [[] for _ in batch]
        if chosen:
            premises = [batch[i] for i in chosen]
            answers = self._imagination.outcomes(premises, list(chosen.values()), likely)
            for i, outcomes in zip(chosen, answers, strict=True):
                found[i] = outcomes
        return found

    def _reserve(
        self, batch: Sequence[Ask], limits: list[int], scratch: int
    ) -> tuple[dict[int, cache.Sequence], dict[int, cache.Sequence]]:
        """Commits each ask's rows to the cache's books; those that found room, by their index: to extend, to draft."""
        sequences = [self._cache.peek(ask.key) for ask in batch]
        pinned = {sequence for sequence in sequences if sequence is not None}
        extended: dict[int, cache.Sequence] = {}
        drafting: dict[int, cache.Sequence] = {}
        for i, (ask, sequence) in enumerate(zip(batch, sequences, strict=True)):
            if sequence is None:
                continue
            start = ask.base_len - 1 - ask.rows
            if ask.rows:
                self._cache.truncate(sequence, start)
            elif not limits[i] or not _is_at(sequence, ask.base_len):
                continue
            if not self._cache.reserve(sequence, ask.rows + scratch, pinned):
                continue
            if ask.rows:
                self._cache.append(sequence, start, ask.rows)
                extended[i] = sequence
            if limits[i]:
                drafting[i] = sequence
        return extended, drafting

    def _extend(self, batch: Sequence[Ask], extended: dict[int, cache.Sequence]) -> None:
        """Computes the new rows in one pass, and publishes them."""
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        features = []
        for i, sequence in extended.items():
            ask = batch[i]
            place = sequence.start + sequence.length - ask.rows
            ids += sequence.tokens[ask.base_len - ask.rows : ask.base_len]
            positions += range(ask.base_len - 1 - ask.rows, ask.base_len - 1)
            places += range(place, place + ask.rows)
            assert ask.features is not None
            features.append(ask.features)
        head, held = self._head, extended.values()
        joined = features[0] if len(features) == 1 else torch.cat(features)
        packed = torch.tensor([ids, positions, places], device=head.device)
        counts = [batch[i].rows for i in extended]
        rows = Rows(packed[0], packed[1], packed[2], [s.start for s in held], [s.length for s in held], counts)
        keep = None if len(ids) == len(counts) else torch.tensor(last_rows(counts), device=head.device)
        output = head.forward(rows, joined.to(device=head.device, dtype=head.dtype), keep)
        for row, (i, sequence) in enumerate(extended.items()):
            sequence.tip = batch[i].base_len, output[row : row + 1]
            self._cache.publish(sequence)

    def _decode(self, sequences: list[cache.Sequence], depth: int) -> list[list[int]]:
        """`depth` greedy tokens per sequence from their tips: `[sequences][depth]`."""
        head = self._head
        ids, feature = head.pick(tips(sequences))
        chosen = [ids]
        starts, ones = [s.start for s in sequences], [1] * len(sequences)
        positions, places = steps_behind(sequences, depth - 1, head.device)
        for step in range(depth - 1):
            lengths = [s.length + 1 + step for s in sequences]
            ids, feature = head.pick(
                head.forward(Rows(ids, positions[step], places[step], starts, lengths, ones), feature, None)
            )
            chosen.append(ids)
        drafts: list[list[int]] = torch.stack(chosen, dim=1).tolist()
        return drafts


def _is_at(sequence: cache.Sequence, base_len: int) -> bool:
    """Whether drafting can start at `base_len`: nothing came since the round that ended there."""
    return sequence.tip is not None and sequence.tip[0] == base_len == len(sequence.tokens)
