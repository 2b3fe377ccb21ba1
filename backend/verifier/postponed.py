"""Rows that no drafter waits for yet.  Pure bookkeeping of spans and tensors; worker's process, on the model's thread.

While nothing is drafted (K = 0 in force), projecting and sending every step's rows at once would make plain steps dearer than
those of a server that never speculates.  They are put aside as they are, and go out together when drafts are asked for again,
or when there are many: the drafter then extends its cache over all of them in one round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

MOST_ROWS = 1024
"""Rows put aside before they go out all the same: they hold memory of the target's device."""


@dataclass(frozen=True)
class Span:
    """What one request computed in a step, or in several.

    Rows `offset .. offset + rows - 1` of the hidden states are the features of positions `start .. start + rows - 1`, all of
    them final (rejected draft positions are not part of it).  `tokens(a, b)` gives the request's token ids `a .. b-1`; it may
    be called in the step the span is of, not later.
    """

    request_id: str
    start: int
    offset: int
    rows: int
    wants_draft: bool
    tokens: Callable[[int, int], list[int]]


@dataclass
class Postponed:
    """The rows of the steps since they last went out."""

    rows: int = 0
    _steps: list[tuple[list[Span], torch.Tensor]] = field(default_factory=list)

    def add(self, spans: list[Span], hidden: torch.Tensor) -> None:
        """Puts a step's rows aside.  `hidden`: `[num_tokens, width]`; copied, for the runner uses its memory again."""
        places: list[int] = []
        kept: list[Span] = []
        for span in spans:
            kept.append(replace(span, offset=len(places)))
            places += range(span.offset, span.offset + span.rows)
        self._steps.append((kept, hidden[torch.tensor(places, device=hidden.device, dtype=torch.long)]))
        self.rows += len(places)

    def with_present(self, spans: list[Span], hidden: torch.Tensor) -> tuple[list[Span], torch.Tensor]:
        """What was put aside and the present step, as if all had been computed now; nothing is aside any more.

        Of requests that are not in the present step nothing is kept: they are over, or will be computed anew.
        """
        if not self._steps:
            return spans, hidden
        steps = [*self._steps, (spans, hidden)]
        self._steps, self.rows = [], 0
        parts: dict[str, list[tuple[int, Span]]] = {span.request_id: [] for span in spans}
        base = 0
        for its_spans, its_hidden in steps:
            for span in its_spans:
                if span.request_id in parts:
                    _append(parts[span.request_id], base + span.offset, span)
            base += len(its_hidden)
        joined = torch.cat([its_hidden for _, its_hidden in steps])
        places: list[int] = []
        merged: list[Span] = []
        for span in spans:
            at, pieces = len(places), parts[span.request_id]
            for first, piece in pieces:
                places += range(first, first + piece.rows)
            merged.append(replace(span, start=pieces[0][1].start, offset=at, rows=len(places) - at))
        return merged, joined[torch.tensor(places, device=joined.device, dtype=torch.long)]


def _append(pieces: list[tuple[int, Span]], first: int, span: Span) -> None:
    """Adds rows that follow those before them; computed anew after a preemption, they take the place of those."""
    if pieces and pieces[-1][1].start + pieces[-1][1].rows != span.start:
        pieces.clear()
    pieces.append((first, span))
