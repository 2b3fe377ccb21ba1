"""Keeps the feature rows of running requests: one log per request.  Pure bookkeeping of tensors and bytes.

Worker process, on the thread that runs the model.  A step's rows first wait where the model left them, until drafters need rows
or many wait.  Then they are projected, piece by piece, with one call for each head that serves their requests, and appended to
their logs in host memory.  So steps without drafts cost little, and rows of requests that end first are never projected.

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
from vllm.utils.torch_utils import async_tensor_h2d

from backend.wire.drafting import FeatureDtype

MOST_WAITING, AT_ONCE = 4096, 512
"""Fewer rows wait after any step.  If more would, the oldest are projected, at least so many.  Of 64 requests, those with
outputs of 64 tokens end before that.  However many are projected, no more than so many are at once: their memory is no part of
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


class _Piece(NamedTuple):
    """At most `AT_ONCE` rows that are in no log yet, one part behind the other."""

    parts: list[_Part]
    rows: torch.Tensor
    made: torch.cuda.Event | None
    """Happens once they are computed; None except on CUDA."""


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
        self._pieces: deque[_Piece] = deque()
        self.waiting = 0
        """Rows of all pieces."""

    def add(self, step: StepRows, layers: Sequence[torch.Tensor]) -> None:
        """Copies a step's final rows, those of all layers side by side.  A layer is `[num_tokens, width]`."""
        for parts in _pieces(step):
            places = _places(parts, layers[0].device)
            rows = torch.cat([layer[places] for layer in layers], dim=-1)
            made = torch.cuda.current_stream().record_event() if rows.is_cuda else None
            self._pieces.append(_Piece(parts, rows, made))
            self.waiting += len(rows)
            if self.waiting >= MOST_WAITING:
                self.settle(MOST_WAITING - AT_ONCE)

    def settle(self, left: int = 0) -> None:
        """Appends waiting rows to the logs, the oldest first, until at most `left` wait.  `trim` must follow.

        Rows that a log has already were computed anew after a preemption and are skipped.  A log begins anew where rows begin
        before it or behind a gap, and for another projection.
        """
        while self.waiting > left:
            pieces = [self._pieces.popleft()]
            size = len(pieces[0].rows)
            while size < self.waiting - left and size + len(self._pieces[0].rows) <= AT_ONCE:
                pieces.append(self._pieces.popleft())
                size += len(pieces[-1].rows)
            self.waiting -= size
            self._project(pieces)

    def _project(self, pieces: list[_Piece]) -> None:
        groups: dict[Projection | None, list[_Part]] = {}
        offset = 0
        for piece in pieces:
            for request_id, start, _, count in piece.parts:
                if request_id:
                    groups.setdefault(self._projection_of(request_id), []).append((request_id, start, offset, count))
                offset += count
        copies: list[torch.Tensor] = []
        with _behind(pieces[-1].made):
            whole = torch.cat([piece.rows for piece in pieces]) if len(pieces) > 1 else pieces[0].rows
            for project, parts in groups.items():
                rows = whole[_places(parts, whole.device)]
                copies.append((rows if project is None else project(rows)).contiguous().to("cpu", non_blocking=True))
        for (project, parts), rows in zip(groups.items(), copies, strict=True):
            self._append(project, parts, rows)

    def _append(self, project: Projection | None, parts: list[_Part], rows: torch.Tensor) -> None:
        size, at = rows.shape[-1] * rows.element_size(), 0
        row_format = RowFormat(DTYPE_NAMES[rows.dtype], rows.shape[-1], size)
        data = rows.view(torch.uint8).view(-1).numpy().data
        for request_id, start, _, count in parts:
            log = self.get(request_id)
            if log is None or log.project is not project or not log.start <= start <= log.end:
                self._drop(request_id)
                log = self[request_id] = Log(project, row_format, start, start)
                self.fresh[request_id] = start
            self.fresh.setdefault(request_id, log.end)
            new = data[at + (log.end - start) * size : at + count * size]
            if new:
                log.chunks.append(bytes(new))
                log.end += len(new) // size
                self.held += len(new)
            at += count * size

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops all rows of requests that have ended."""
        over = set(request_ids)
        for piece in self._pieces:
            piece.parts[:] = [("", *part[1:]) if part[0] in over else part for part in piece.parts]
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


@contextmanager
def _behind(made: torch.cuda.Event | None) -> Iterator[None]:
    """On CUDA, what is launched in this block begins once `made` has happened; the end of the block waits for it.

    It has a stream of its own.  In the model's stream, it would also wait for a step that began early.
    """
    if made is None:
        yield
        return
    with torch.cuda.stream(_own_stream()):
        made.wait()
        yield
        _own_stream().synchronize()


def _pieces(step: StepRows) -> Iterator[list[_Part]]:
    """A step's final rows, at most `AT_ONCE` in a piece, by their places in the hidden states."""
    piece, room, at = list[_Part](), AT_ONCE, 0
    for request_id, start, count, computed in zip(step.request_ids, step.starts, step.counts, step.computed, strict=True):
        done = 0
        while done < count:
            taken = min(count - done, room)
            piece.append((request_id, start + done, at + done, taken))
            done, room = done + taken, room - taken
            if not room:
                yield piece
                piece, room = [], AT_ONCE
        at += computed
    if piece:
        yield piece


def _places(parts: list[_Part], device: torch.device) -> slice | torch.Tensor:
    """An index of the rows of these parts in their tensor."""
    first, total = parts[0][2], sum(part[3] for part in parts)
    if parts[-1][2] + parts[-1][3] - first == total:
        return slice(first, first + total)
    offsets, counts = np.array([part[2:] for part in parts]).T
    at = np.repeat(offsets - (counts.cumsum() - counts), counts) + np.arange(total)
    places: torch.Tensor = async_tensor_h2d(at, device=device)
    return places
