"""Keeps the feature rows of running requests: one log per request.  Pure bookkeeping of tensors and bytes.

Worker process, on the thread that runs the model.  A step's rows first wait where the model left them, until drafters need rows
or many wait.  Then they are projected, in one call for each head that serves their requests, and appended to the requests'
logs in host memory.  So steps without drafts cost little, and rows of requests that end first are never projected.

A drafter computes its KV cache from a request's rows.  One that is new to a request gets the whole log, and reaches the state
of the drafter before it, even if that one is gone.  When memory is short, the longest log gives up its older half: the next
drafter then lacks distant context, nothing else.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from backend.wire.drafting import FeatureDtype

MOST_WAITING, AT_ONCE = 4096, 512
"""Fewer rows wait at any time.  If more would, the oldest are projected, at least so many at once.  Of 64 requests, those with
outputs of 64 tokens end before that."""

DTYPE_NAMES: dict[torch.dtype, FeatureDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

Projection = Callable[[torch.Tensor], torch.Tensor]
"""Maps features of the target, `[rows, n * target_hidden]`, to what a drafter takes, `[rows, hidden]`."""


class StepRows(NamedTuple):
    """The rows that a step's requests computed, one request after the other in the hidden states.

    `counts[i]` of the `computed[i]` rows of request i are final: its features from position `starts[i]` on.  Those of rejected
    draft tokens follow.  `texts[i]` begins with the request's token ids; it is valid only during the step.
    """

    request_ids: list[str]
    starts: list[int]
    counts: list[int]
    computed: list[int]
    texts: Sequence[np.ndarray[Any, Any]]

    def tokens(self, i: int, first: int, end: int) -> list[int]:
        """Request i's token ids `first .. end - 1`."""
        return cast("list[int]", self.texts[i][first:end].tolist())


class RowFormat(NamedTuple):
    """What rows are in host memory and on the wire.  `width` 0: a drafter gets none."""

    dtype: FeatureDtype = "float32"
    width: int = 0
    row_bytes: int = 0


@dataclass
class Log:
    """One request's rows of the positions `start .. end - 1`, which `project` has projected."""

    project: Projection | None
    format: RowFormat
    start: int
    end: int
    chunks: list[bytes] = field(default_factory=list)
    """The rows, as they came: one long array would be moved in memory again and again while it grows."""

    def part(self, first: int, end: int) -> bytes:
        """The rows of the positions `first .. end - 1`."""
        size, at, found = self.format.row_bytes, self.end, []
        for chunk in reversed(self.chunks):
            if at <= first:
                break
            at -= len(chunk) // size
            found.append(chunk[max(first - at, 0) * size : max(end - at, 0) * size])
        return b"".join(reversed(found))


NO_ROWS = Log(None, RowFormat(), 0, 0)
"""In place of a log, for drafters that take tokens only."""


_WaitingStep = tuple[list[str], list[int], list[int], torch.Tensor]
"""Request ids, positions of their first rows, numbers of rows, and the rows of all."""


class RowLogs(dict[str, Log]):
    """The logs by request.  `trim` keeps them within `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self.held = 0
        """Bytes of all logs."""
        self._steps: deque[_WaitingStep] = deque()
        self.waiting = 0
        """Rows that are in no log yet."""

    def add(self, step: StepRows, layers: Sequence[torch.Tensor]) -> None:
        """Copies a step's final rows, those of all layers side by side.  A layer is `[num_tokens, width]`."""
        if step.counts[:-1] == step.computed[:-1]:
            rows = torch.cat([layer[: sum(step.counts)] for layer in layers], dim=-1)
        else:
            rows = _pick(layers, np.cumsum([0, *step.computed[:-1]]), np.array(step.counts))
        self._steps.append((list(step.request_ids), step.starts, step.counts, rows))
        self.waiting += len(rows)

    def settle(self, projection_of: Callable[[str], Projection | None], left: int = 0) -> dict[str, int]:
        """Appends waiting rows to the logs, the oldest steps' first, until at most `left` wait.

        Returns the first position that is new there, of each request that has new rows.  Rows that a log has already were
        computed anew after a preemption and are skipped.  A log begins anew where rows begin before it or behind a gap, and
        for another projection.
        """
        steps: list[_WaitingStep] = []
        while self.waiting > left:
            steps.append(self._steps.popleft())
            self.waiting -= len(steps[-1][-1])
        if not steps:
            return {}
        whole = torch.cat([rows for *_, rows in steps]) if len(steps) > 1 else steps[0][-1]
        groups: dict[Projection | None, list[tuple[str, int, int, int]]] = {}
        offset = 0
        for request_ids, starts, counts, _ in steps:
            for request_id, start, count in zip(request_ids, starts, counts, strict=True):
                if request_id:
                    groups.setdefault(projection_of(request_id), []).append((request_id, start, offset, count))
                offset += count
        fresh: dict[str, int] = {}
        for project, parts in groups.items():
            is_whole = sum(part[-1] for part in parts) == len(whole)
            rows = whole if is_whole else _pick([whole], *np.array([part[2:] for part in parts]).T)
            projected = rows if project is None else project(rows)
            # vLLM has synchronised the stream to read the sampled tokens, so this copy waits for the projection only.
            self._append(project, parts, projected.contiguous().cpu(), fresh)
        return fresh

    def _append(
        self, project: Projection | None, parts: list[tuple[str, int, int, int]], rows: torch.Tensor, fresh: dict[str, int]
    ) -> None:
        size, at = rows.shape[-1] * rows.element_size(), 0
        row_format = RowFormat(DTYPE_NAMES[rows.dtype], rows.shape[-1], size)
        data = rows.view(torch.uint8).view(-1).numpy().data
        for request_id, start, _, count in parts:
            log = self.get(request_id)
            if log is None or log.project is not project or not log.start <= start <= log.end:
                self._drop(request_id)
                log = self[request_id] = Log(project, row_format, start, start)
                fresh[request_id] = start
            fresh.setdefault(request_id, log.end)
            new = data[at + (log.end - start) * size : at + count * size]
            if new:
                log.chunks.append(bytes(new))
                log.end += len(new) // size
                self.held += len(new)
            at += count * size

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops all rows of requests that have ended."""
        over = set(request_ids)
        for waiting, *_ in self._steps:
            waiting[:] = ["" if each in over else each for each in waiting]
        for request_id in over:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        if request_id in self:
            self.held -= sum(map(len, self.pop(request_id).chunks))

    def trim(self) -> None:
        """Has the longest log give up its older half, in whole chunks, until all are within the bound."""
        while self.held > self._capacity:
            log = max(self.values(), key=lambda each: (each.end - each.start) * each.format.row_bytes)
            middle = (log.start + log.end + 1) // 2
            while log.start < middle:
                size = len(log.chunks.pop(0))
                log.start, self.held = log.start + size // log.format.row_bytes, self.held - size


def next_row(sent: range | None, start: int, own: int, room: int | None) -> int:
    """Position of the row from which on a request's rows go to a drafter next; its log begins at `start`.

    `sent`: the rows that the drafter was sent, from the last gap on; None: the request is not open there.  If the log has rows
    before these, all go, and open the request again.  If more than `room` rows before `own` would go, they have to wait.
    """
    at = start if sent is None or start < sent.start else max(start, sent.stop)
    return at if room is None or own - at <= room else max(own, sent.stop if sent is not None else 0)


def _pick(layers: Sequence[torch.Tensor], offsets: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> torch.Tensor:
    """A copy of `counts[i]` rows from `offsets[i]` on, for each i; those of all layers side by side."""
    at = np.repeat(offsets - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
    places = torch.from_numpy(at).to(layers[0].device)
    return torch.cat([layer.index_select(0, places) for layer in layers], dim=-1)
