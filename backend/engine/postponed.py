"""Rows that no drafter waits for yet.  Pure bookkeeping of spans and tensors; worker's process, on the model's thread.

While drafters are not asked, projecting and sending every step's rows at once would make plain steps dearer than
those of a server that never speculates.  They are put aside as they are, and go out together when drafts are asked for again,
or when there are many: the drafter then extends its cache over all of them in one round.  Rows of requests that end meanwhile
never go out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

MOST_ROWS = 4096
"""Rows of live requests put aside before they go out all the same: whoever drafts next has to take them in first."""
MOST_BYTES = 64 * 2**20
"""And bytes, those of requests that have ended included: they are memory of the target's device."""


class Span(NamedTuple):
    """What one request computed in a step, or in several.

    Rows `offset .. offset + rows - 1` of the hidden states are the features of positions `start .. start + rows - 1`, all of
    them final (rejected draft positions are not part of it).  `tokens(a, b)` gives the request's token ids `a .. b-1`; it may
    be called in the step the span is of, not later.
    """

    request_id: str
    start: int
    offset: int
    rows: int
    tokens: Callable[[int, int], list[int]]


def pick_rows(spans: list[Span], hidden: torch.Tensor) -> torch.Tensor:
    """The spans' rows one after the other; a view where they lie so already.  `hidden`: `[num_tokens, width]`."""
    at = 0
    for span in spans:
        if span.offset != at:
            places = [row for span in spans for row in range(span.offset, span.offset + span.rows)]
            return hidden[torch.tensor(places, device=hidden.device, dtype=torch.long)]
        at += span.rows
    return hidden[:at]


@dataclass
class _Aside:
    """One request's rows: of positions `start` and on, `places` among all that is put aside."""

    start: int
    places: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.places)


class Postponed:
    """The rows of the steps since they last went out."""

    def __init__(self) -> None:
        self.rows = 0
        """Of requests that still run."""
        self._blocks: list[torch.Tensor] = []
        self._total = 0
        self._bytes = 0
        self._asides: dict[str, _Aside] = {}

    @property
    def is_full(self) -> bool:
        """Whether they must go out now."""
        return self.rows >= MOST_ROWS or self._bytes >= MOST_BYTES

    def add(self, spans: list[Span], hidden: torch.Tensor) -> None:
        """Puts a step's rows aside.  `hidden`: `[num_tokens, width]`; copied, for the runner uses its memory again."""
        block = pick_rows(spans, hidden)
        block = block.clone() if block.data_ptr() == hidden.data_ptr() else block
        for span in spans:
            aside = self._asides.get(span.request_id)
            if aside is None or aside.end != span.start:
                # Computed anew after a preemption, rows take the place of those before.
                self.rows -= len(aside.places) if aside is not None else 0
                aside = self._asides[span.request_id] = _Aside(span.start)
            aside.places.extend(range(self._total, self._total + span.rows))
            self._total += span.rows
            self.rows += span.rows
        self._blocks.append(block)
        self._bytes += block.numel() * block.element_size()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        for request_id in request_ids:
            aside = self._asides.pop(request_id, None)
            self.rows -= len(aside.places) if aside is not None else 0

    def with_present(self, spans: list[Span], hidden: torch.Tensor) -> tuple[list[Span], torch.Tensor]:
        """What was put aside and the present step, as if all had been computed now; nothing is aside any more.

        Of requests that are not in the present step nothing is kept: they are over, or will be computed anew.
        """
        if not self._blocks:
            return spans, hidden
        joined, base, asides = torch.cat([*self._blocks, hidden]), self._total, self._asides
        self._blocks, self._total, self._bytes, self._asides, self.rows = [], 0, 0, {}, 0
        places: list[int] = []
        merged: list[Span] = []
        for span in spans:
            at, start = len(places), span.start
            aside = asides.get(span.request_id)
            if aside is not None and aside.end == span.start:
                start = aside.start
                places += aside.places
            places += range(base + span.offset, base + span.offset + span.rows)
            merged.append(span._replace(start=start, offset=at, rows=len(places) - at))
        return merged, joined[torch.tensor(places, device=joined.device, dtype=torch.long)]
