"""Collects what a drafter learns from: sequences with their features, and whether drafts were right.

Drafter thread.  `DrafterService` calls `Lessons` for what it receives and what it answers.  A sequence goes to the replay ring
when it ends, unless its request has opted out of learning.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.learning.ring import Replay, ReplayWriter
from backend.learning.rules import Watch
from backend.learning.trainable import LONGEST
from backend.speculation.tokens import UNKNOWN, splice
from backend.wire.drafting import Commit, Open, Outcome

RECORDED = 16
"""Most sequences recorded at a time; further ones are not recorded."""
CONTEXT = 256
"""Only the last 256 rows of a prompt are kept."""
SHORTEST = 16
"""Answers of fewer rows are not worth a file."""


@dataclass
class _Record:
    """Rows of one sequence so far, from position `first` on, without a gap."""

    first: int
    prompt: int
    temperature: float
    parts: list[Tensor] = field(default_factory=list)
    rows: int = 0

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.first + self.rows


@dataclass
class _Text:
    tokens: list[int]
    record: _Record | None
    pending: list[tuple[int, list[int], int]] = field(default_factory=list)
    """Drafts that are not judged yet: base length, tokens that must come there first, and the draft's first token.

    Only the first token is judged, because the length of a draft depends on the verifier's load.
    """


class Lessons:
    """Records all open sequences of a drafter."""

    def __init__(self, writer: ReplayWriter, watch: Watch) -> None:
        self._writer = writer
        self.watch = watch
        """The service tells it of other heads and other weights."""
        self._texts: dict[Hashable, _Text] = {}

    def opened(self, key: Hashable, item: Open, features: Tensor | None) -> None:
        """A sequence begins, perhaps again."""
        self.forget(key)
        record = None
        if item.learn and sum(text.record is not None for text in self._texts.values()) < RECORDED:
            record = _Record(item.base_len - 1 - item.rows, item.prompt, item.temperature)
        text = self._texts[key] = _Text(list(item.tokens), record)
        self._add(text, item.base_len, item.rows, features)

    def committed(self, key: Hashable, item: Commit, features: Tensor | None) -> None:
        """A sequence goes on."""
        text = self._texts.get(key)
        if text is None:
            return
        if item.tokens:
            splice(text.tokens, item.base_len, item.tokens)
            self._judge(key, text)
        self._add(text, item.base_len, item.rows, features)

    def closed(self, key: Hashable) -> None:
        """A sequence is over."""
        text = self._texts.pop(key, None)
        if text is None or text.record is None:
            return
        record = text.record
        tokens = text.tokens[record.first : record.end + 1]
        if record.end - max(record.prompt, record.first) < SHORTEST or len(tokens) <= record.rows or UNKNOWN in tokens:
            return
        features = torch.cat(record.parts)
        token_ids = torch.tensor(tokens, dtype=torch.int32)
        self._writer.put(Replay(token_ids, features, record.first, record.prompt, record.temperature).last(LONGEST))

    def forget(self, key: Hashable) -> None:
        """Drops a sequence; it does not go to the ring."""
        self._texts.pop(key, None)

    def drafted(self, key: Hashable, base_len: int, first: Sequence[int]) -> None:
        """A fresh draft was made; `first`: its first token, whether or not it was sent."""
        text = self._texts.get(key)
        if text is not None and first:
            text.pending.append((base_len, [], first[0]))

    def imagined(self, key: Hashable, base_len: int, verifying: list[int], outcomes: Sequence[Outcome]) -> None:
        """Drafts for outcomes of a verification were made.  Only the draft for the outcome that comes will be judged."""
        text = self._texts.get(key)
        if text is not None:
            text.pending += [(base_len, [*verifying[: o.accepted], o.token], o.tokens[0]) for o in outcomes if o.tokens]

    def _add(self, text: _Text, base_len: int, rows: int, features: Tensor | None) -> None:
        """Takes rows into the record; gives it up where there is a gap."""
        record = text.record
        if record is None or not rows or features is None:
            return
        start = base_len - 1 - rows
        if start > record.end or (record.rows and start < record.first):
            text.record = None
            return
        if start < record.end:
            kept = torch.cat(record.parts)[: start - record.first]
            record.parts, record.rows = [kept], len(kept)
        # A copy: the view would keep the whole round's frame in memory.
        record.parts.append(features.clone())
        record.rows += rows
        surplus = min(record.prompt - CONTEXT - record.first, record.rows - 1)
        if record.rows > 2 * LONGEST:
            surplus = max(surplus, record.rows - LONGEST)
        if surplus > 0:
            record.parts = [torch.cat(record.parts)[surplus:].clone()]
            record.first, record.rows = record.first + surplus, record.rows - surplus

    def _judge(self, key: Hashable, text: _Text) -> None:
        """Compares drafts with the text, as far as both go."""
        waiting = []
        for base_len, before, first in text.pending:
            at = base_len + len(before)
            came = text.tokens[base_len:at]
            if came != before[: len(came)]:
                continue
            if len(text.tokens) <= at:
                waiting.append((base_len, before, first))
                continue
            self.watch.note_first_token(key, text.tokens[at] == first)
        text.pending = waiting
