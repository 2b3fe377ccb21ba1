"""Proposes with an EAGLE head or a draft model: extends the cache by true rows, then decodes K tokens (`draws.py`).

Drafter thread.  Both parts are batched over all sequences of a batch, from all verifiers.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from backend import noise
from backend.drafter import cache
from backend.drafter.decoding import Decoder, columns_behind, rows_behind, tips
from backend.drafter.draws import Ends, Rules
from backend.drafter.head import LONG, Head, Stretch
from backend.drafter.outcomes import Imagination, Padding
from backend.drafter.proposer import GREEDY, MAX_DRAFT, NOTHING, Drafted, DraftRequest, Premise, ProposerStats, Sampling, Until
from backend.drafter.sessions import TORCH_DTYPES
from backend.models.checkpoint import HeadWeights
from backend.models.head_config import DRAFT_MODEL
from backend.wire.drafting import Outcome

BATCH_ROWS = 2048
"""Most rows computed per batch: a long prompt is read over several batches, while other requests get their drafts."""


def compute_dtype(stored: str, device: torch.device) -> torch.dtype:
    """The head's own type; on a CPU float32, which is faster there and no less exact."""
    return torch.float32 if device.type == "cpu" else TORCH_DTYPES.get(stored, torch.float32)


class EagleProposer:
    """An EAGLE head behind the `Proposer` protocol."""

    head_class: type[Head] = Head
    longest = MAX_DRAFT

    def __init__(self, weights: HeadWeights, cache_tokens: int, device: str = "cpu", graphs: bool = True) -> None:
        config = weights.config
        self.vocab_size = config.vocab_size
        self.borrowed = weights.borrowed
        self.max_position = weights.max_position
        where = torch.device(device)
        self.dtype = dtype = compute_dtype(config.dtype, where)
        self._cache = cache.RowCache(cache_tokens, lambda *move: self._head.move(*move), int(config.kind != DRAFT_MODEL))
        # A batch drafts on until its last row is done, so rows may go past their own end; outcomes begin as much later.
        positions = self.max_position + 2 * MAX_DRAFT
        with torch.inference_mode():
            self._head = self.head_class(weights, where, dtype, self._cache.capacity, positions)
        raw = weights.projection
        self._projection = None if raw is None else raw.to(self._head.device, self._head.dtype)
        width = config.hidden_size if raw is None else raw.weight.shape[1]
        self.hidden = width if self._head.takes_features else 0
        noise.warm_up(where)
        with torch.inference_mode():
            self._decoder = Decoder(self._head, graphs)
        self._imagination = Imagination(self._head, self._decoder, self.max_position)

    def open(self, key: Hashable, tokens: list[int], rows: int, sampling: Sampling = GREEDY) -> None:
        """Starts a sequence.  Reuses rows of an earlier one with the same prefix, up to where its own features begin."""
        self._cache.open(key, tokens, len(tokens) - 1 - rows).sampling = sampling

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int) -> bool:
        sequence = self._cache.get(key)
        if sequence is None:
            return False
        # After a preemption the verifier repeats positions that are known here.  An empty round must not take tokens back.
        if rows or tokens or base_len > len(sequence.tokens):
            self._cache.extend_tokens(sequence, base_len, tokens)
            sequence.tip = None if tokens else sequence.tip
        return True

    def close(self, key: Hashable) -> None:
        """Ends a sequence; its rows stay for reuse."""
        self._cache.close(key)

    def length(self, key: Hashable) -> int | None:
        sequence = self._cache.peek(key)
        return None if sequence is None else len(sequence.tokens)

    def invalidate(self) -> None:
        """Rows made from features of the target's old weights serve no further sequence."""
        self._cache.invalidate()

    def usage(self) -> ProposerStats:
        held = self._cache
        return ProposerStats(len(held), held.usage, held.evictions)

    @torch.inference_mode()
    def draft(self, batch: Sequence[DraftRequest]) -> list[Drafted]:
        """Extends all sequences in one pass, then decodes together those that are to be drafted for."""
        limits = [max(min(ask.until.k, self.longest, self.max_position - ask.base_len), 0) for ask in batch]
        depth = max(limits, default=0)
        extended, drafting = self._reserve(batch, limits, self._scratch_rows(depth))
        if extended:
            self._extend(batch, extended)
        drafts: dict[int, Drafted] = {}
        if drafting:
            sequences = list(drafting.values())
            ends = Ends([limits[i] for i in drafting], [batch[i].until for i in drafting], [s.sampling for s in sequences])
            drafts = dict(zip(drafting, self._decode(sequences, ends, depth), strict=True))
        return [drafts.get(i, NOTHING) for i in range(len(batch))]

    @torch.inference_mode()
    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        """Drafts for likely outcomes of verifications.  Its cache rows are scratch: the next true rows overwrite them."""
        likely = Padding.of(batch)
        chosen: dict[int, cache.Sequence] = {}
        for i, premise in enumerate(batch):
            sequence = self._cache.peek(premise.key)
            wanted = premise.outcomes > 0 and premise.until.k > 0
            if sequence is None or not wanted or not _is_at(sequence, premise.base_len):
                continue
            if self._cache.reserve(sequence, likely.scratch, takes_from_open=False):
                chosen[i] = sequence
        if not chosen:
            return [[] for _ in batch]
        answers = self._imagination.outcomes([batch[i] for i in chosen], list(chosen.values()), likely)
        found = dict(zip(chosen, answers, strict=True))
        return [found.get(i, []) for i in range(len(batch))]

    def _scratch_rows(self, depth: int) -> int:
        """Cache rows that a draft of `depth` tokens takes behind a sequence's last."""
        return max(depth - 1, 0)

    def _reserve(
        self, batch: Sequence[DraftRequest], limits: list[int], scratch: int
    ) -> tuple[dict[int, cache.Sequence], dict[int, cache.Sequence]]:
        """Reserves cache rows, and commits true ones.  Returns sequences to extend, and to draft for, by index in `batch`."""
        sequences = [self._cache.peek(ask.key) for ask in batch]
        pinned = {sequence for sequence in sequences if sequence is not None}
        extended: dict[int, cache.Sequence] = {}
        drafting: dict[int, cache.Sequence] = {}
        for i, (ask, sequence) in enumerate(zip(batch, sequences, strict=True)):
            if sequence is None:
                continue
            start = ask.base_len - self._head.token_offset - ask.rows
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

    def _extend(self, batch: Sequence[DraftRequest], extended: dict[int, cache.Sequence]) -> None:
        """Computes the new rows in one pass."""
        # Those with many come last, where `Rows` has stretches.
        extended = dict(sorted(extended.items(), key=lambda item: batch[item[0]].rows >= LONG))
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        features = []
        for i, sequence in extended.items():
            ask, end = batch[i], batch[i].base_len - self._head.token_offset
            place = sequence.start + sequence.length - ask.rows
            ids += sequence.tokens[ask.base_len - ask.rows : ask.base_len]
            positions += range(end - ask.rows, end)
            places += range(place, place + ask.rows)
            if ask.features is not None:
                features.append(ask.features)
        head, held = self._head, extended.values()
        joined = None
        if features:
            joined = (features[0] if len(features) == 1 else torch.cat(features)).to(device=head.device, dtype=head.dtype)
        if self._projection is not None and joined is not None:
            joined = self._projection(joined)
        counts = [batch[i].rows for i in extended]
        begins = [s.start for s, count in zip(held, counts, strict=True) for _ in range(count)]
        zeros, ones = [0] * len(ids), [1] * len(ids)
        numbers = torch.tensor([ids, positions, places, begins, zeros, zeros, ones, zeros], device=head.device)
        stretches = [Stretch(s.start, s.length, count) for s, count in zip(held, counts, strict=True)]
        output = self._compute(numbers, joined, stretches)
        for row, (i, sequence) in enumerate(extended.items()):
            sequence.tip = batch[i].base_len, output[row : row + 1]

    def _compute(self, numbers: Tensor, features: Tensor | None, stretches: list[Stretch]) -> Tensor:
        """Computes new rows, `[8, rows]` as in `decoding.NUMBERS`; the outputs of each sequence's last one."""
        counts = [stretch.new for stretch in stretches]
        last = torch.tensor([end - 1 for end in accumulate(counts)], device=self._head.device)
        return self._decoder.extend(numbers, features, last, [stretch for stretch in stretches if stretch.new >= LONG])

    def _decode(self, sequences: list[cache.Sequence], ends: Ends, depth: int) -> list[Drafted]:
        """Drafts at most `depth` tokens per sequence, starting from each sequence's tip."""
        device = self._head.device
        rules = Rules.needed_by([s.sampling for s in sequences])
        rows, columns = rows_behind(sequences, self._head), columns_behind(sequences, device)
        batch = self._decoder.batch(depth, rules, rows, columns, tips(sequences))
        drafts = batch.decode(depth, lambda: ends, picks_first=True)
        for sequence, drafted, outputs in zip(sequences, drafts, batch.outputs_of(batch.taken - 1), strict=True):
            sequence.drafted = sequence.start, drafted.tokens, outputs
        return drafts


def _is_at(sequence: cache.Sequence, base_len: int) -> bool:
    """Whether drafting can start at `base_len`: the latest round ended there, and no token came since."""
    return sequence.tip is not None and sequence.tip[0] == base_len == len(sequence.tokens)


class ModelProposer(EagleProposer):
    """A draft model behind the `Proposer` protocol: a small language model, decoded like a head but without features.

    Row p of the cache is computed from the token at p alone.  So missing rows can be computed from a request's text at any
    time, and a drafted token's row stays if the token is accepted.
    """

    def commit(self, key: Hashable, base_len: int, tokens: list[int], rows: int) -> bool:
        """Takes the newest tokens, and commits rows already computed for them.  A text with a hole is forgotten."""
        length = self.length(key)
        if length is not None and base_len - len(tokens) > length:
            self.close(key)
            return False
        known = super().commit(key, base_len, tokens, rows)
        sequence = self._cache.peek(key)
        if sequence is not None and tokens:
            self._cache.adopt(sequence)
        return known

    def invalidate(self) -> None:
        """Does nothing: rows do not depend on the target's weights."""

    def draft(self, batch: Sequence[DraftRequest]) -> list[Drafted]:
        """Computes the rows that the sequences lack, then decodes together those that are to be drafted for."""
        left = BATCH_ROWS
        asks = []
        for ask in batch:
            sequence, base_len = self._cache.peek(ask.key), ask.base_len
            if sequence is None or base_len != len(sequence.tokens) or base_len + MAX_DRAFT > self._cache.longest:
                asks.append(DraftRequest(ask.key, base_len, 0, None))
                continue
            # Rows behind a gap, left when earlier rows were given to another sequence, are of no use.
            self._cache.truncate(sequence, sequence.unbroken)
            missing = base_len - sequence.unbroken
            rows = min(missing, left)
            left -= rows
            until = ask.until if rows == missing else Until(0)
            asks.append(DraftRequest(ask.key, base_len - missing + rows, rows, None, until))
        drafts = super().draft(asks)
        for ask, drafted in zip(asks, drafts, strict=True):
            if drafted is not NOTHING:
                # The last draft token has no row: nothing was drafted after it.
                self._note_ahead(ask.key, drafted.tokens[:-1])
        return drafts

    def draft_outcomes(self, batch: Sequence[Premise]) -> list[list[Outcome]]:
        found = super().draft_outcomes(batch)
        for premise, outcomes in zip(batch, found, strict=True):
            if outcomes:
                self._note_ahead(premise.key, premise.verifying)
        return found

    def _note_ahead(self, key: Hashable, tokens: list[int]) -> None:
        sequence = self._cache.peek(key)
        if sequence is not None:
            sequence.ahead = sequence.end, tokens
