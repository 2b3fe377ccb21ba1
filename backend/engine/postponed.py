"""Feature rows that are sent later, because no drafter waits for them.  Pure bookkeeping of spans and tensors.

Worker process, on the model's thread.  While no drafts are asked for, projecting and sending every step's rows would make plain
steps slower than without speculation.  So a step's rows are set aside unprojected, as one tensor with its layout.  They are
sent together when drafts are asked for again, or before there are many; the drafter then extends its cache in one round.
Rows of requests that end first are never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

MOST_ROWS = 512
"""Fewer rows are set aside at any time: so many, and its own, are the most that one step sends."""


class RowSpan(NamedTuple):
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


def pick_rows(spans: list[RowSpan], layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the spans' rows, one after the other; those of all layers side by side.  A layer is `[num_tokens, width]`."""
    end = 0
    for span in spans:
        if span.offset != end:
            break
        end += span.rows
    else:
        return torch.cat([layer[:end] for layer in layers], dim=-1)
    offsets, counts = np.array([(span.offset, span.rows) for span in spans]).T
    total, begins = counts.sum(), counts.cumsum() - counts
    at = torch.from_numpy(np.repeat(offsets - begins, counts) + np.arange(total)).to(layers[0].device)
    return torch.cat([layer.index_select(0, at) for layer in layers], dim=-1)


class _Step(NamedTuple):
    """One step's rows, request after request."""

    request_ids: list[str]
    starts: list[int]
    """Position of each request's first row."""
    counts: list[int]
    """Rows of each request."""
    rows: torch.Tensor


@dataclass
class _Run:
    """One request's consecutive rows of the positions `start .. end - 1`, and where they are in all steps' rows."""

    start: int
    end: int
    places: list[int] = field(default_factory=list)


class Postponed:
    """The rows of all steps since rows were last sent."""

    def __init__(self) -> None:
        self.rows = 0
        self._steps: list[_Step] = []
        self._over: dict[str, int] = {}
        """Requests that have ended or were preempted: the number of steps whose rows are dropped."""

    def has_room(self, rows: int) -> bool:
        """Whether so many rows may be set aside, too."""
        return self.rows + rows < MOST_ROWS

    def add(self, request_ids: list[str], starts: list[int], counts: list[int], rows: torch.Tensor) -> None:
        """Sets a step's rows aside, `counts` of each request from position `starts` on.  `rows` is kept, not copied."""
        self._steps.append(_Step(request_ids, starts, counts, rows))
        self.rows += len(rows)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops the rows of requests that have ended or are preempted."""
        if self._steps:
            self._over.update(dict.fromkeys(request_ids, len(self._steps)))

    def with_present(self, spans: list[RowSpan], block: torch.Tensor) -> tuple[list[RowSpan], torch.Tensor]:
        """Takes out all postponed rows, merged with the current step's, `block`.  Returns spans, and their rows in this order.

        Rows of requests that are not in this step stay: vLLM had no tokens for them.  Others must be forgotten.
        """
        if not self._steps:
            return spans, block
        rows, runs, at = torch.cat([*(step.rows for step in self._steps), block]), self._runs(), self.rows
        places: list[int] = []
        merged: list[RowSpan] = []
        for span in spans:
            run, start = runs.pop(span.request_id, None), span.start
            if run is not None and run.end == start:
                start = run.start
                places += run.places
            places += range(at, at + span.rows)
            at += span.rows
            merged.append(span._replace(start=start, rows=span.start + span.rows - start))
        self.rows, self._steps, self._over = 0, [], {}
        if runs:
            left = [place for run in runs.values() for place in run.places]
            starts, counts = [run.start for run in runs.values()], [len(run.places) for run in runs.values()]
            self.add(list(runs), starts, counts, _at(rows, left))
        return merged, _at(rows, places)

    def _runs(self) -> dict[str, _Run]:
        """Each request's rows, as far as they are consecutive and not dropped."""
        runs: dict[str, _Run] = {}
        at = 0
        for number, step in enumerate(self._steps):
            for request_id, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
                if number >= self._over.get(request_id, 0):
                    run = runs.get(request_id)
                    if run is None or run.end != start:
                        # After a preemption, recomputed rows replace the earlier ones.
                        run = runs[request_id] = _Run(start, start)
                    run.places += range(at, at + count)
                    run.end += count
                at += count
        return runs


def _at(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    return rows.index_select(0, torch.tensor(places, dtype=torch.int64, device=rows.device))
