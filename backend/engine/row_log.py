"""Keeps the feature rows of running requests: one log per request.  Pure bookkeeping of tensors and bytes.

Worker process, on the thread that runs the model.  A step's rows are taken before it is known which of them are final
(`begin`): the device still computes, or has tokens to sample.  If drafters need rows now, all are projected at once, with one
call for each head that serves their requests; `end` appends those that are final to their logs in host memory.  Else they
wait on the device until drafters need rows or many wait.  So steps without drafts cost little.  Rows of steps whose requests
have all ended by then are never projected.

A drafter computes its KV cache from a request's rows.  One that is new to a request gets the whole log, and reaches the state
of the drafter before it, even if that one is gone.  When memory is short, the longest log gives up its older half: the next
drafter then lacks distant context, nothing else.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from backend.wire.drafting import FeatureDtype

MOST_WAITING, AT_ONCE = 4096, 512
"""Once so many rows wait, the oldest are projected, at least `AT_ONCE`.  Of 64 requests, those with outputs of 64 tokens end
before that.  Rows of a longer step do not wait.  No more than `AT_ONCE` are projected at once: their memory is no part of
vLLM's plan."""

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

    def part(self, first: int, end: int) -> list[memoryview]:
        """The rows of the positions `first .. end - 1`, one behind the other; nothing is copied."""
        size, at, found = self.format.row_bytes, self.end, []
        for chunk in reversed(self.chunks):
            if at <= first:
                break
            at -= len(chunk) // size
            found.append(memoryview(chunk)[max(first - at, 0) * size : max(end - at, 0) * size])
        return found[::-1]


NO_ROWS = Log(None, RowFormat(), 0, 0)
"""In place of a log, for drafters that take tokens only."""


_Part = tuple[str, int, int, int]
"""Some of a request's rows: request id, position of the first row, where that is in a tensor, and their number."""


class _Taken(NamedTuple):
    """Rows that a step has computed, all layers side by side."""

    rows: torch.Tensor
    made: torch.cuda.Event | None
    """Happens once they are computed; None except on CUDA."""


class _Projected(NamedTuple):
    """All rows that a step has computed, in host memory, once the stream of this module is done."""

    of: list[Projection | None]
    """Each request's projection."""
    rows: dict[Projection | None, list[torch.Tensor]]
    layers: Sequence[torch.Tensor]
    """Still read until then."""


class RowLogs(dict[str, Log]):
    """The logs by request.  `trim` keeps them within `capacity` bytes."""

    def __init__(self, capacity: int, projection_of: Callable[[str], Projection | None]) -> None:
        """`projection_of(request_id)` is applied to a request's rows."""
        super().__init__()
        self._capacity, self._projection_of = capacity, projection_of
        self.held = 0
        """Bytes of all logs."""
        self.fresh: dict[str, int] = {}
        """By request whose log has grown since the sender took this last: the first position that is new there."""
        self._begun: _Taken | _Projected | None = None
        """The rows of the step that `end` has not told of yet."""
        self._pieces: deque[tuple[list[_Part], _Taken]] = deque()
        """What waits: the final rows of earlier steps."""
        self.waiting = 0
        """Rows of all pieces."""

    def begin(self, request_ids: list[str], count: int, layers: Sequence[torch.Tensor], is_needed: bool) -> None:
        """Takes the first `count` rows of `layers`, each `[num_tokens, width]`: what a step has computed of its requests.

        `is_needed`: drafters need them at once.  `end` must follow, then `trim`.
        """
        if not is_needed and count <= AT_ONCE:
            taken = torch.cat([layer[:count] for layer in layers], dim=-1)
            self._begun = _Taken(taken, _made(taken))
            if self.waiting >= MOST_WAITING:
                self.settle(MOST_WAITING - AT_ONCE)
            return
        self.settle()
        of = [self._projection_of(request_id) for request_id in request_ids]
        rows: dict[Projection | None, list[torch.Tensor]] = {project: [] for project in of}
        with _beside(_made(layers[0])):
            for first in range(0, count, AT_ONCE):
                part = torch.cat([layer[first : min(first + AT_ONCE, count)] for layer in layers], dim=-1)
                for project, projected in rows.items():
                    projected.append(_to_host(part if project is None else project(part)))
        self._begun = _Projected(of, rows, layers)

    def end(self, step: StepRows) -> None:
        """Says which rows of the step that has begun are final: they are appended to the logs, or wait.  `trim` must follow."""
        begun, self._begun = self._begun, None
        ends = np.cumsum(step.computed).tolist()
        parts = [
            (request_id, start, end - computed, count)
            for request_id, start, end, computed, count in zip(
                step.request_ids, step.starts, ends, step.computed, step.counts, strict=True
            )
        ]
        if isinstance(begun, _Taken):
            self._pieces.append((parts, begun))
            self.waiting += len(begun.rows)
        elif begun is not None:
            _wait_for(begun.layers[0])
            for project, rows in begun.rows.items():
                whole = torch.cat(rows) if len(rows) > 1 else rows[0]
                self._append(project, [part for part, of in zip(parts, begun.of, strict=True) if of is project], whole)

    def settle(self, left: int = 0) -> None:
        """Appends waiting rows to the logs, the oldest first, until at most `left` wait.  `trim` must follow.

        Rows that a log has already were computed anew after a preemption and are skipped.  A log begins anew where rows begin
        before it or behind a gap, and for another projection.
        """
        while self.waiting > left:
            groups: dict[Projection | None, list[_Part]] = {}
            size, taken = 0, list[_Taken]()
            while self.waiting > left and (not taken or size + len(self._pieces[0][1].rows) <= AT_ONCE):
                parts, rows = self._pieces.popleft()
                self.waiting -= len(rows.rows)
                if not parts:
                    continue
                for request_id, start, at, count in parts:
                    groups.setdefault(self._projection_of(request_id), []).append((request_id, start, size + at, count))
                taken.append(rows)
                size += len(rows.rows)
            if not taken:
                break
            with _beside(taken[-1].made):
                whole = torch.cat([each.rows for each in taken])
                projected = [_to_host(whole if project is None else project(whole)) for project in groups]
            _wait_for(whole)
            for (project, of), rows_of in zip(groups.items(), projected, strict=True):
                self._append(project, of, rows_of)

    def _append(self, project: Projection | None, parts: list[_Part], rows: torch.Tensor) -> None:
        size = rows.shape[-1] * rows.element_size()
        row_format = RowFormat(DTYPE_NAMES[rows.dtype], rows.shape[-1], size)
        data = rows.view(torch.uint8).view(-1).numpy().data
        for request_id, start, at, count in parts:
            log = self.get(request_id)
            if log is None or log.project is not project or not log.start <= start <= log.end:
                self._drop(request_id)
                log = self[request_id] = Log(project, row_format, start, start)
                self.fresh[request_id] = start
            self.fresh.setdefault(request_id, log.end)
            new = data[(at + log.end - start) * size : (at + count) * size]
            if new:
                log.chunks.append(bytes(new))
                log.end += len(new) // size
                self.held += len(new)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops all rows of requests that have ended."""
        over = set(request_ids)
        for parts, _ in self._pieces:
            parts[:] = [part for part in parts if part[0] not in over]
        for request_id in over:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        if request_id in self:
            self.held -= sum(map(len, self.pop(request_id).chunks))
            self.fresh.pop(request_id, None)

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


@cache
def _own_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _made(rows: torch.Tensor) -> torch.cuda.Event | None:
    """What happens once `rows`, and all that was launched before, are computed; None except on CUDA."""
    return torch.cuda.current_stream().record_event() if rows.is_cuda else None


@contextmanager
def _beside(made: torch.cuda.Event | None) -> Iterator[None]:
    """On CUDA, what is launched in this block runs in a stream of its own, once `made` has happened.

    In the model's stream, it would also wait for a step that began early.
    """
    if made is None:
        yield
        return
    with torch.cuda.stream(_own_stream()):
        made.wait()
        yield


def _wait_for(rows: torch.Tensor) -> None:
    """Waits for what was launched beside the model, where `rows` are on CUDA."""
    if rows.is_cuda:
        _own_stream().synchronize()


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory; on CUDA into pinned memory, and it is not waited for."""
    if not rows.is_cuda:
        return rows.contiguous()
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
