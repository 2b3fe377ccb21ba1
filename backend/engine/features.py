"""Ships features to the drafters: the worker's half of the drafting wire.

Runs in the worker's process (tensor-parallel rank 0 alone) on the thread that runs the model.  Per engine step and drafter one
`Round` leaves: for each request the rows the target has just computed, projected by the EAGLE head's `fc` so that one hidden
width and not three crosses the wire.  Sending never blocks: when a drafter's queue is full the round is dropped, the drafter
keeps a gap, and the request loses acceptance, nothing else.

A drafter that is new to a request (assigned a moment ago, restarted, or the request's other drafter left) gets the features of
all its positions at once, as far as `FeatureStore` has kept them: its drafts are then accepted as those of the old one were.
Only so many rows are handed over per step; until its turn comes a request is drafted for without that context.

What comes back on these sockets is read once per step: a drafter that does not know us any more is greeted again, and requests
it does not know are opened again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from backend.engine.feature_link import FeatureLink, Projection
from backend.engine.feature_store import FeatureStore
from backend.engine.postponed import Postponed, Span, pick_rows
from backend.fleet import DrafterRef
from backend.models.head_config import CheckpointError
from backend.speculation.pairing import drafter_for, having
from backend.transport import Wire
from backend.wire.drafting import (
    Close,
    Commit,
    FeatureDtype,
    Open,
    Round,
    encode,
)

logger = logging.getLogger(__name__)

HANDOVER_ROWS = 8192
"""Rows handed over to one drafter per step, so that the others' drafts are not kept waiting; also per message."""

DTYPE_NAMES: dict[torch.dtype, FeatureDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass
class Handover:
    """Requests that a drafter was given with rows computed before it knew them."""

    requests: int = 0
    rows: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True)
class Shipped:
    """Bytes sent, rounds dropped at a full queue and hand-overs, per drafter, and the drafters that were greeted again."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    overflows: Counter[str] = field(default_factory=Counter)
    greeted: set[str] = field(default_factory=set)
    handovers: defaultdict[str, Handover] = field(default_factory=lambda: defaultdict(Handover))


@dataclass(frozen=True)
class Identity:
    """What a drafter is told of a request when it is opened (see `Open`)."""

    trace: str = ""
    seed: int = 0
    temperature: float = 0.0
    prompt: int = 0
    learn: bool = True


@dataclass(frozen=True)
class _Rows:
    """A step's features by request, as they travel."""

    of: dict[str, bytes] = field(default_factory=dict)
    dtype: FeatureDtype = "float32"
    width: int = 0
    """0: drafters need no features."""
    row_bytes: int = 0


class FeatureShipper:
    """The sockets to all drafters of this verifier, and what each knows of each request."""

    hurried: bool = True
    """Whether drafters need the rows now; otherwise they may be sent later."""
    identity_of: Callable[[str], Identity] = staticmethod(lambda request_id: Identity())
    """Asked once, when a request is opened on a drafter."""

    def __init__(
        self,
        verifier_id: str,
        projection: Callable[[str], Projection | None],
        ring_bytes: int = 0,
        handover_bytes: int = 0,
    ) -> None:
        """`projection(head)` is what is applied to features for drafters with that head; see `DrafterRef.head`."""
        self._verifier_id = verifier_id
        self._ring_bytes = ring_bytes
        self._projection = projection
        self._weights = 0
        self._assigned: dict[str, str] = {}
        """Drafters and their heads as the scheduler has them, those without a link included: both must choose the same drafter
        for a request."""
        self.chosen: dict[str, str] = {}
        """The head that the scheduler has chosen for a request, where drafters differ."""
        self._store = FeatureStore(handover_bytes)
        self._postponed = Postponed()
        self._links: dict[str, FeatureLink] = {}
        self._epoch = 0
        self._shipped = Shipped()
        """Since it was last taken."""

    def set_drafters(self, wire: Wire, refs: list[DrafterRef], epoch: int, weights: int = 0) -> None:
        """Connects to new drafters, leaves those no longer assigned.  `epoch` is shared with the scheduler's sockets.

        With other `weights` of the target every drafter is connected to anew, and earlier features are not handed over.
        """
        wanted = {ref.id: ref for ref in refs}
        for drafter_id, link in list(self._links.items()):
            if wanted.get(drafter_id) != link.ref or weights != self._weights:
                link.close()
                del self._links[drafter_id]
        if weights != self._weights:
            self._store.clear()
            self._postponed = Postponed()
        self._epoch, self._weights = epoch, weights
        self._assigned = {ref.id: ref.head for ref in refs}
        for ref in refs:
            if ref.id not in self._links:
                self._connect(wire, ref)
        for drafter_id, link in self._links.items():
            # Should such a request come back, it is opened anew: what it did elsewhere is unknown here.
            self._close(link, [r for r in link.next_row if self._drafter_of(r) != drafter_id], "moved")

    def _connect(self, wire: Wire, ref: DrafterRef) -> None:
        try:
            project = self._projection(ref.head) if ref.takes_features else None
        except CheckpointError as error:
            # It would draft from what it takes for features: rather no drafts.
            logger.error("drafter %s is not used: %s", ref.id, error)
            return
        self._links[ref.id] = FeatureLink(wire, ref, project, self._verifier_id, self._epoch, self._weights, self._ring_bytes)

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests are over; drafters are told with the next round."""
        over = list(request_ids)
        self._postponed.forget(over)
        for request_id in over:
            self._store.forget(request_id)
            self.chosen.pop(request_id, None)
        for link in self._links.values():
            self._close(link, over, "finished")

    @staticmethod
    def _close(link: FeatureLink, request_ids: Iterable[str], reason: str) -> None:
        for request_id in request_ids:
            if link.next_row.pop(request_id, None) is not None:
                link.cold.discard(request_id)
                link.closed.append(Close(request_id, reason))

    def ship(self, spans: list[Span], hidden: torch.Tensor | None) -> None:
        """Sends this step's rows, or puts them aside.  `hidden`: `[num_tokens, width]` before `fc`, or None when drafters need
        no features."""
        if hidden is not None:
            if not self.hurried and not self._postponed.is_full:
                self._postponed.add(spans, hidden)
                return
            spans, hidden = self._postponed.with_present(spans, hidden)
        by_drafter: dict[str, list[Span]] = {drafter_id: [] for drafter_id in self._assigned}
        for span in spans:
            chosen = self._drafter_of(span.request_id)
            if chosen is not None:
                by_drafter[chosen].append(span)
        rows = self._features(spans, hidden, self._projection(""))
        for span in spans:
            self._store.add(span.request_id, span.start, rows.of.get(span.request_id, b""), rows.row_bytes)
        for drafter_id, its_spans in by_drafter.items():
            link = self._links.get(drafter_id)
            if link is None:
                continue
            if link.listen():
                self._shipped.greeted.add(drafter_id)
            if its_spans or link.closed:
                self._ship_to(link, its_spans, self._rows_for(link, its_spans, hidden, rows))

    def _drafter_of(self, request_id: str) -> str | None:
        return drafter_for(request_id, having(self._assigned, self.chosen.get(request_id)))

    def _rows_for(self, link: FeatureLink, spans: list[Span], hidden: torch.Tensor | None, rows: _Rows) -> _Rows:
        """Of the fleet's rows, or its head's own, or none."""
        if not link.ref.takes_features:
            return _Rows()
        return self._features(spans, hidden, link.project) if link.ref.head else rows

    def _ship_to(self, link: FeatureLink, spans: list[Span], rows: _Rows) -> None:
        items: list[Open | Commit | Close] = []
        frames: list[bytes] = []
        opened: set[str] = set()
        room = HANDOVER_ROWS
        for span in spans:
            handed = self._hand_over(link, span, rows, room)
            if handed is not None:
                item, frame, count = handed
                room -= count
                opened.add(span.request_id)
            else:
                item, first = self._item(link, span, bool(rows.width))
                frame = rows.of.get(span.request_id, b"")[first * rows.row_bytes :]
            items.append(item)
            frames.append(frame)
        if not self._send(link, items, b"".join(frames), rows):
            for unsent in items:
                if isinstance(unsent, Open) or unsent.request_id in opened:
                    link.next_row.pop(unsent.request_id, None)

    def _send(self, link: FeatureLink, items: list[Open | Commit | Close], frame: bytes, rows: _Rows) -> bool:
        """One round, what is closed first; False when the drafter's queue is full."""
        at = link.leave(frame)
        header = encode(Round(self._epoch, rows.dtype, rows.width, [*link.closed, *items], at))
        if link.socket.send(header, frame if at is None else b""):
            link.closed.clear()
            self._shipped.bytes_sent[link.ref.id] += len(header) + len(frame)
            return True
        self._shipped.overflows[link.ref.id] += 1
        return False

    def _hand_over(self, link: FeatureLink, span: Span, rows: _Rows, room: int) -> tuple[Open | Commit, bytes, int] | None:
        """Opens a request with all rows that are kept: the last part of it, its features, and how many rows were handed over.

        None when there are no earlier rows, the drafter has them, or it is not this request's turn.  Whoever has more rows
        than fit one message is given them in several, each an extension of the one before.
        """
        request_id, end = span.request_id, span.start + span.rows
        start = self._store.start(request_id, end)
        # What is kept was projected for the fleet's own head.
        if (
            link.ref.head
            or not rows.width
            or start >= span.start
            or (request_id in link.next_row and request_id not in link.cold)
        ):
            return None
        if span.start - start > room and room < HANDOVER_ROWS:
            link.cold.add(request_id)
            return None
        item: Open | Commit
        at = start
        while True:
            upto = min(at + HANDOVER_ROWS, end)
            if at == start:
                item = self._open(request_id, span.tokens(0, upto + 1), upto - at)
            else:
                item = Commit(request_id, upto + 1, span.tokens(at + 1, upto + 1), upto - at)
            frame = self._store.rows(request_id, at, upto, rows.row_bytes)
            if upto == end:
                break
            if not self._send(link, [item], frame, rows):
                link.next_row.pop(request_id, None)
                return None
            at = upto
        link.next_row[request_id] = end
        link.cold.discard(request_id)
        count = span.start - start
        handed = self._shipped.handovers[link.ref.id]
        handed.requests, handed.rows = handed.requests + 1, handed.rows + count
        handed.bytes_sent += count * rows.row_bytes
        return item, frame, count

    def _item(self, link: FeatureLink, span: Span, with_features: bool) -> tuple[Open | Commit, int]:
        """The message for one request and the first row of its span that the drafter does not have yet."""
        base_len = span.start + span.rows + 1
        known = link.next_row.get(span.request_id)
        link.next_row[span.request_id] = max(span.start + span.rows, known or 0)
        if known is None:
            rows = span.rows if with_features else 0
            return self._open(span.request_id, span.tokens(0, base_len), rows), 0
        first = min(max(known - span.start, 0), span.rows)
        tokens = span.tokens(span.start + first + 1, base_len)
        return Commit(span.request_id, base_len, tokens, len(tokens) if with_features else 0), first

    def _open(self, request_id: str, tokens: list[int], rows: int) -> Open:
        known = self.identity_of(request_id)
        return Open(
            request_id,
            len(tokens),
            tokens,
            rows,
            known.seed,
            known.temperature,
            known.trace,
            known.prompt,
            known.learn,
        )

    def _features(self, spans: list[Span], hidden: torch.Tensor | None, project: Projection | None) -> _Rows:
        """All rows of these spans, projected together."""
        if hidden is None:
            return _Rows()
        picked = pick_rows(spans, hidden)
        projected = picked if project is None else project(picked)
        # The step's own read-back of the sampled tokens has already synchronised the stream: this copy waits for `fc` alone.
        raw = projected.contiguous().cpu()
        row_bytes = raw.shape[-1] * raw.element_size()
        joined = raw.view(torch.uint8).numpy().tobytes()
        of: dict[str, bytes] = {}
        at = 0
        for span in spans:
            of[span.request_id] = joined[at : at + span.rows * row_bytes]
            at += span.rows * row_bytes
        return _Rows(of, DTYPE_NAMES[raw.dtype], raw.shape[-1], row_bytes)

    def take_counters(self) -> Shipped:
        """What happened since the last call."""
        taken, self._shipped = self._shipped, Shipped()
        return taken
