"""Feature rows that are sent later, because no drafter waits for them.  Pure bookkeeping of spans and tensors.

Worker process, on the model's thread.  While no drafts are asked for, projecting and sending every step's rows would make plain
steps slower than without speculation.  So rows are set aside unprojected.  They are sent together when drafts are asked for
again, or when there are many; the drafter then extends its cache in one round.  Rows of requests that end first are never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

MOST_ROWS = 4096
"""Rows of running requests at which all are sent: a drafter must take them in before it can draft."""
MOST_BYTES = 64 * 2**20
"""Bytes at which all are sent, those of ended requests included: they occupy memory of the target's device."""


class Span(NamedTuple):
    """The rows that one request computed in a step, or in several.

    Rows `offset .. offset + rows - 1` of the hidden states are the features of positions `start .. start + rows - 1`.  All of
    them are final: positions of rejected draft tokens are excluded.  `tokens(a, b)` gives the request's token ids `a .. b-1`;
    it is valid only during the span's own step.
    """

    request_id: str
    start: int
    offset: int
    rows: int
    tokens: Callable[[int, int], list[int]]


def pick_rows(spans: list[Span], layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the spans' rows, one after the other; those of all layers side by side.  A layer is `[num_tokens, width]`."""
    offsets, counts = np.array([(span.offset, span.rows) for span in spans], dtype=np.int64).reshape(-1, 2).T
    total, begins = counts.sum(), counts.cumsum() - counts
    if (offsets == begins).all():
        return torch.cat([layer[:total] for layer in layers], dim=-1)
    places = np.repeat(offsets - begins, counts) + np.arange(total)
    at = torch.from_numpy(places).to(layers[0].device)
    return torch.cat([layer.index_select(0, at) for layer in layers], dim=-1)


@dataclass
class _Aside:
    """One request's rows of the positions `start .. end - 1`: a tensor per step, each a view of the step's copy."""

    start: int
    end: int
    rows: list[torch.Tensor] = field(default_factory=list)


class Postponed:
    """The rows of all steps since rows were last sent."""

    def __init__(self) -> None:
        self.rows = 0
        """Rows of requests that still run."""
        self._bytes = 0
        self._asides: dict[str, _Aside] = {}

    @property
    def is_full(self) -> bool:
        """Whether the rows must be sent now."""
        return self.rows >= MOST_ROWS or self._bytes >= MOST_BYTES

    def add(self, spans: list[Span], block: torch.Tensor) -> None:
        """Sets a step's rows aside: the result of `pick_rows`, which is kept."""
        self._bytes += block.numel() * block.element_size()
        for span, rows in zip(spans, torch.split(block, [span.rows for span in spans]), strict=True):
            aside = self._asides.get(span.request_id)
            if aside is None or aside.end != span.start:
                # After a preemption, recomputed rows replace the earlier ones.
                self.forget([span.request_id])
                aside = self._asides[span.request_id] = _Aside(span.start, span.start)
            aside.rows.append(rows)
            aside.end += span.rows
            self.rows += span.rows

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops the rows of requests that have ended or are preempted."""
        for request_id in request_ids:
            aside = self._asides.pop(request_id, None)
            self.rows -= aside.end - aside.start if aside is not None else 0

    def with_present(self, spans: list[Span], block: torch.Tensor) -> tuple[list[Span], torch.Tensor]:
        """Takes out all postponed rows, merged with the current step's, `block`.  Returns spans, and their rows in this order.

        Rows of requests that are not in this step stay: vLLM had no tokens for them.  Others must be forgotten.
        """
        if not self._bytes:
            return spans, block
        parts: list[torch.Tensor] = [block[:0]]
        merged: list[Span] = []
        for span, rows in zip(spans, torch.split(block, [span.rows for span in spans]), strict=True):
            aside, start = self._asides.pop(span.request_id, None), span.start
            if aside is not None and aside.end == start:
                start = aside.start
                parts += aside.rows
            parts.append(rows)
            merged.append(span._replace(start=start, rows=span.start + span.rows - start))
        for aside in self._asides.values():
            # A copy, so that the memory of the others' rows is freed.
            aside.rows = [torch.cat(aside.rows)]
        self.rows = sum(aside.end - aside.start for aside in self._asides.values())
        self._bytes = sum(aside.rows[0].numel() * aside.rows[0].element_size() for aside in self._asides.values())
        return merged, torch.cat(parts)
