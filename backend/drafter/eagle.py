"""Proposes with an EAGLE head: extends the cache by the target's true features, then decodes K tokens greedily.

Drafter thread.  Both halves are batched over the sequences of a round, whichever verifier they come from.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from backend.drafter import cache
from backend.drafter.checkpoint import HeadWeights
from backend.drafter.head import Head, Rows, last_rows
from backend.drafter.proposer import MAX_DRAFT, Ask, Usage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
            sequence.answer = None if tokens else sequence.answer
        return True

    def close(self, key: Hashable) -> None:
        """Ends a sequence; its rows stay for reuse."""
        self._cache.close(key)

    def requests(self) -> list[Hashable]:
        """Open requests."""
        return self._cache.open_keys()

    def close_idle(self, before: float) -> None:
        """Closes sequences unheard of since `before`."""
        for key in self._cache.idle_since(before):
            self._cache.close(key)

    def usage(self) -> Usage:
        """Counters and load."""
        held = self._cache
        return Usage(len(held), held.usage, held.prefix_rows_reused, held.evictions)

    @torch.inference_mode()
    def draft(self, batch: Sequence[Ask]) -> list[list[int]]:
        """Extends all sequences in one pass, then decodes those that want drafts, together."""
        limits = [max(min(ask.k, MAX_DRAFT, self.max_position - ask.base_len), 0) for ask in batch]
        depth = max(limits, default=0)
        extended = self._extend_cache(batch, max(depth - 1, 0))
        drafts: list[list[int]] = [[] for _ in batch]
        silent = [i for i in extended if not limits[i]]
        drafting = [i for i in extended if limits[i]]
        if silent:
            rows, features = self._rows(batch, silent, extended)
            self._head.forward(rows, features, None if len(self._head.layers) == 1 else self._last(rows), wanted=False)
        if drafting:
            rows, features = self._rows(batch, drafting, extended)
            for i, tokens in zip(drafting, self._decode(rows, features, depth), strict=True):
                drafts[i] = tokens[: limits[i]]
        self._remember(batch, extended, drafts)
        return drafts

    def _extend_cache(self, batch: Sequence[Ask], scratch: int) -> dict[int, cache.Sequence]:
        """Commits each ask's rows to the cache's books; those that found room, by their index in the batch."""
        sequences = [self._cache.peek(ask.key) for ask in batch]
        pinned = {sequence for sequence in sequences if sequence is not None}
        extended: dict[int, cache.Sequence] = {}
        for i, (ask, sequence) in enumerate(zip(batch, sequences, strict=True)):
            if sequence is None or not ask.rows:
                continue
            start = ask.base_len - 1 - ask.rows
            self._cache.truncate(sequence, start)
            if self._cache.reserve(sequence, ask.rows + scratch, pinned):
                self._cache.append(sequence, start, ask.rows)
                extended[i] = sequence
        return extended

    def _rows(self, batch: Sequence[Ask], chosen: list[int], extended: dict[int, cache.Sequence]) -> tuple[Rows, Tensor]:
        """The forward pass that computes the new rows of `chosen`, and their features `[rows, hidden]`."""
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        features = []
        for i in chosen:
            ask, sequence = batch[i], extended[i]
            place = sequence.start + sequence.length - ask.rows
            ids += sequence.tokens[ask.base_len - ask.rows : ask.base_len]
            positions += range(ask.base_len - 1 - ask.rows, ask.base_len - 1)
            places += range(place, place + ask.rows)
            assert ask.features is not None
            features.append(ask.features)
        joined = features[0] if len(features) == 1 else torch.cat(features)
        packed = torch.tensor([ids, positions, places], device=self._head.device)
        held = [extended[i] for i in chosen]
        starts, lengths = [s.start for s in held], [s.length for s in held]
        rows = Rows(packed[0], packed[1], packed[2], starts, lengths, [batch[i].rows for i in chosen])
        return rows, joined.to(device=self._head.device, dtype=self._head.dtype)

    def _decode(self, rows: Rows, features: Tensor, depth: int) -> list[list[int]]:
        """Computes the new rows and `depth` greedy tokens per sequence: `[sequences][depth]`."""
        head = self._head
        single = all(count == 1 for count in rows.counts)
        keep = None if single else self._last(rows)
        output = head.forward(rows, features, keep)
        assert output is not None
        ids, feature = head.pick(output)
        chosen = [ids]
        if depth > 1 and keep is not None:
            rows = replace(rows, positions=rows.positions[keep], places=rows.places[keep], counts=[1] * len(rows.counts))
        for _ in range(depth - 1):
            rows = replace(
                rows,
                ids=ids,
                positions=rows.positions + 1,
                places=rows.places + 1,
                lengths=[length + 1 for length in rows.lengths],
            )
            output = head.forward(rows, feature, None)
            assert output is not None
            ids, feature = head.pick(output)
            chosen.append(ids)
        drafts: list[list[int]] = torch.stack(chosen, dim=1).tolist()
        return drafts

    def _remember(self, batch: Sequence[Ask], extended: dict[int, cache.Sequence], drafts: list[list[int]]) -> None:
        """Publishes new rows, keeps each answer, and repeats it to whoever asks again without news."""
        for i, ask in enumerate(batch):
            if i in extended:
                sequence = extended[i]
                self._cache.publish(sequence)
                sequence.answer = (ask.base_len, drafts[i]) if drafts[i] else None
            elif not ask.rows and ask.k:
                known = self._cache.peek(ask.key)
                if known is not None and known.answer is not None and known.answer[0] == ask.base_len:
                    drafts[i] = known.answer[1][: ask.k]

    def _last(self, rows: Rows) -> Tensor:
        return torch.tensor(last_rows(rows.counts), device=self._head.device)
