"""Sends features to the drafters: the worker's half of the drafting wire.

Worker process (tensor-parallel rank 0 only), on the thread that runs the model.  In each engine step, one `Round` goes to each
drafter.  It holds, per request, the rows that the target has just computed.  The EAGLE head's `fc` projects them first, so one
hidden width crosses the wire instead of three.  Sending never blocks.  When a drafter's queue is full, the round is dropped and
the drafter keeps a gap: acceptance falls, nothing else.

A drafter that is new to a request (just assigned, restarted, or replacing another one) gets the features of all its positions,
as far as `FeatureStore` has kept them.  Its drafts are then accepted as often as its predecessor's.  The rows handed over per
step are limited.  Until its turn comes, a request is drafted for without that context.

Answers on these sockets are read once per step.  A drafter that has forgotten this verifier is greeted again; requests that it
has forgotten are opened again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from backend.engine.feature_link import FeatureLink, Projection
from backend.engine.feature_store import FeatureStore
from backend.engine.postponed import Postponed, RowSpan, pick_rows
from backend.fleet import DraftCounters, DrafterRef
from backend.models.head_config import CheckpointError
from backend.speculation.pairing import Pairings
from backend.transport import Wire
from backend.wire.drafting import Close, Commit, FeatureDtype, Open, Round, encode

logger = logging.getLogger(__name__)

HANDOVER_ROWS = 8192
"""Rows handed over to one drafter per step, and per message; with more, other requests' drafts would wait longer."""

NO_ROWS = memoryview(b"")

DTYPE_NAMES: dict[torch.dtype, FeatureDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True)
class Shipped:
    """What was sent to drafters, by their ids."""

    counters: defaultdict[str, DraftCounters] = field(default_factory=lambda: defaultdict(DraftCounters))
    """Bytes sent, hand-overs, and rounds dropped because a queue was full."""
    greeted: set[str] = field(default_factory=set)
    """Drafters that were greeted again."""


@dataclass(frozen=True)
class _Rows:
    """A step's features by request id, encoded for the wire."""

    of: dict[str, memoryview] = field(default_factory=dict)
    dtype: FeatureDtype = "float32"
    width: int = 0
    """0: drafters need no features."""
    row_bytes: int = 0


class FeatureShipper:
    """The `features` sockets to all drafters, and which rows each drafter has of each request."""

    features_needed: bool = True
    """Whether drafters need the rows now, not later."""
    opening: Callable[[str, list[int], int], Open] = staticmethod(
        lambda name, tokens, rows: Open(name, len(tokens), tokens, rows)
    )
    """Makes the message that opens a request on a drafter, with its tokens and number of rows."""

    def __init__(self, projection: Callable[[str], Projection | None], ring_bytes: int = 0, handover_bytes: int = 0) -> None:
        """`projection(head)` is applied to features for drafters with that head (`DrafterRef.head`)."""
        self._ring_bytes = ring_bytes
        self._projection = projection
        self._weights = 0
        self._assigned: dict[str, str] = {}
        """Drafter id to head.  Copies the scheduler's table, including drafters that could not be connected; otherwise both
        sides would choose different drafters for a request."""
        self.pairings = Pairings()
        """By request, as the scheduler has decided."""
        self._drafters: dict[str, str | None] = {}
        """The drafter of each request under the present assignment."""
        self._store = FeatureStore(handover_bytes)
        self.postponed = Postponed()
        self._links: dict[str, FeatureLink] = {}
        self._epochs: dict[DrafterRef, int] = {}
        """When each drafter was assigned.  Its link has this epoch, as the scheduler's has, even if it is made later."""
        self._epoch = 0
        self._shipped = Shipped()
        """Counts since the last `take_counters`."""

    def set_drafters(self, wire: Wire, verifier_id: str, refs: list[DrafterRef], epoch: int, weights: int = 0) -> None:
        """Connects to new drafters and leaves those no longer assigned.  The scheduler's sockets have the same `epoch`.

        After a change of `weights`, all drafters are connected to anew, and features of the old weights are dropped.
        """
        wanted = {ref.id: ref for ref in refs}
        for drafter_id, link in list(self._links.items()):
            if wanted.get(drafter_id) != link.ref or weights != self._weights:
                link.close()
                del self._links[drafter_id]
        if weights != self._weights:
            self._store.clear()
            self.postponed, self._epochs = Postponed(), {}
        self._epoch, self._weights = epoch, weights
        self._epochs = {ref: self._epochs.get(ref, epoch) for ref in refs}
        self._assigned, self._drafters = {ref.id: ref.head for ref in refs}, {}
        for ref in refs:
            if ref.id not in self._links:
                self._connect(wire, verifier_id, ref)
        for drafter_id, link in self._links.items():
            # A request that comes back is opened again, because this drafter has missed what happened meanwhile.
            self._close(link, [r for r in link.next_row if self._drafter_of(r) != drafter_id], "moved")

    def _connect(self, wire: Wire, verifier_id: str, ref: DrafterRef) -> None:
        try:
            project = self._projection(ref.head) if ref.takes_features else None
        except CheckpointError as error:
            # Without its projection the drafter would get wrong features; no drafts are better.
            logger.error("drafter %s is not used: %s", ref.id, error)
            return
        self._links[ref.id] = FeatureLink(wire, ref, project, verifier_id, self._epochs[ref], self._weights, self._ring_bytes)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that have ended; drafters learn of it with the next round."""
        over = list(request_ids)
        if not over:
            return
        self.postponed.forget(over)
        for request_id in over:
            self._store.forget(request_id)
            self.pairings.pop(request_id, None)
            self._drafters.pop(request_id, None)
        for link in self._links.values():
            self._close(link, over, "finished")

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Forgets postponed rows of requests that will be computed anew."""
        self.postponed.forget(request_ids)

    @staticmethod
    def _close(link: FeatureLink, request_ids: Iterable[str], reason: str) -> None:
        for request_id in request_ids:
            if link.next_row.pop(request_id, None) is not None:
                link.cold.discard(request_id)
                link.closed.append(Close(request_id, reason))

    def set_aside(self, request_ids: list[str], starts: list[int], counts: list[int], layers: Sequence[torch.Tensor]) -> bool:
        """Postpones a step whose rows are all final, `counts` of each request, if there is room; no drafter may need them."""
        if not self.postponed.has_room(total := sum(counts)):
            return False
        # A copy: the runner reuses its memory.
        self.postponed.add(request_ids, starts, counts, torch.cat([layer[:total] for layer in layers], dim=-1))
        return True

    def ship(self, spans: list[RowSpan], layers: Sequence[torch.Tensor] | None) -> None:
        """Sends this step's rows, or postpones them if drafters are in no hurry.

        `layers`: each `[num_tokens, width]`; side by side they are the features before `fc`.  None: drafters need no features.
        """
        picked = None
        if layers is not None:
            picked = pick_rows(spans, layers)
            if not self.features_needed and self.postponed.has_room(len(picked)):
                starts, counts = [span.start for span in spans], [span.rows for span in spans]
                self.postponed.add([span.request_id for span in spans], starts, counts, picked)
                return
            spans, picked = self.postponed.with_present(spans, picked)
        by_drafter: dict[str, list[RowSpan]] = {drafter_id: [] for drafter_id in self._assigned}
        for span in spans:
            chosen = self._drafter_of(span.request_id)
            if chosen is not None:
                by_drafter[chosen].append(span)
        rows = self._features(spans, picked, self._projection(""))
        for span in spans:
            self._store.add(span.request_id, span.start, rows.of.get(span.request_id, NO_ROWS), rows.row_bytes)
        for drafter_id, its_spans in by_drafter.items():
            link = self._links.get(drafter_id)
            if link is None:
                continue
            if link.receive_answers():
                self._shipped.greeted.add(drafter_id)
            if its_spans or link.closed:
                its_rows = self._rows_for(link, its_spans, spans, picked, rows)
                self._ship_to(link, its_spans, its_rows)

    def _drafter_of(self, request_id: str) -> str | None:
        if request_id not in self._drafters:
            self._drafters[request_id] = self.pairings[request_id].drafter(self._assigned)
        return self._drafters[request_id]

    def _rows_for(
        self, link: FeatureLink, its_spans: list[RowSpan], spans: list[RowSpan], picked: torch.Tensor | None, rows: _Rows
    ) -> _Rows:
        """The rows for this drafter: none, `rows` (the fleet's head), or its own of `picked`, projected for its own head."""
        if not link.ref.takes_features:
            return _Rows()
        if not link.ref.head or picked is None:
            return rows
        its = {span.request_id for span in its_spans}
        parts = zip(spans, torch.split(picked, [span.rows for span in spans]), strict=True)
        own = torch.cat([picked[:0], *(part for span, part in parts if span.request_id in its)])
        return self._features(its_spans, own, link.project)

    def _ship_to(self, link: FeatureLink, spans: list[RowSpan], rows: _Rows) -> None:
        items: list[Open | Commit | Close] = []
        frames: list[bytes | memoryview] = []
        opened: set[str] = set()
        room = HANDOVER_ROWS
        for span in spans:
            handed = self._hand_over(link, span, rows, room)
            frame: bytes | memoryview
            if handed is not None:
                item, frame, count = handed
                room -= count
                opened.add(span.request_id)
            else:
                item, first = self._item(link, span, bool(rows.width))
                frame = rows.of.get(span.request_id, NO_ROWS)[first * rows.row_bytes :]
            items.append(item)
            frames.append(frame)
        if not self._send(link, items, frames, rows):
            for unsent in items:
                if isinstance(unsent, Open) or unsent.request_id in opened:
                    link.next_row.pop(unsent.request_id, None)

    def _send(
        self, link: FeatureLink, items: list[Open | Commit | Close], frame: Sequence[bytes | memoryview], rows: _Rows
    ) -> bool:
        """Sends one round, pending `Close` items first; returns False if the drafter's queue is full.  `frame`: its parts."""
        size = sum(map(len, frame))
        at = link.leave(frame, size)
        header = encode(Round(rows.dtype, rows.width, [*link.closed, *items], at))
        counters = self._shipped.counters[link.ref.id]
        if link.socket.send(header, b"".join(frame) if at is None else b""):
            link.closed.clear()
            counters.bytes_sent += len(header) + size
            return True
        counters.dropped["overflow"] = counters.dropped.get("overflow", 0) + 1
        return False

    def _hand_over(self, link: FeatureLink, span: RowSpan, rows: _Rows, room: int) -> tuple[Open | Commit, bytes, int] | None:
        """Opens a request on a drafter with all rows that are kept.

        Returns the message, its features, and the number of rows handed over.  If they need several messages, all but the last
        are sent here.  None if there are no earlier rows, the drafter has them, the step's limit is used up, or sending failed.
        """
        request_id, end = span.request_id, span.start + span.rows
        start = self._store.start(request_id, end)
        # The kept rows were projected for the fleet's own head and fit no other.
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
                item = self.opening(request_id, span.tokens(0, upto + 1), upto - at)
            else:
                item = Commit(request_id, upto + 1, span.tokens(at + 1, upto + 1), upto - at)
            frame = self._store.rows(request_id, at, upto, rows.row_bytes)
            if upto == end:
                break
            if not self._send(link, [item], [frame], rows):
                link.next_row.pop(request_id, None)
                return None
            at = upto
        link.next_row[request_id] = end
        link.cold.discard(request_id)
        count = span.start - start
        counters = self._shipped.counters[link.ref.id]
        counters.handovers += 1
        counters.handover_rows += count
        counters.handover_bytes += count * rows.row_bytes
        return item, frame, count

    def _item(self, link: FeatureLink, span: RowSpan, with_features: bool) -> tuple[Open | Commit, int]:
        """The message for one request, and the first row of its span that the drafter does not have."""
        base_len = span.start + span.rows + 1
        known = link.next_row.get(span.request_id)
        link.next_row[span.request_id] = max(span.start + span.rows, known or 0)
        if known is None:
            rows = span.rows if with_features else 0
            return self.opening(span.request_id, span.tokens(0, base_len), rows), 0
        first = min(max(known - span.start, 0), span.rows)
        tokens = span.tokens(span.start + first + 1, base_len)
        return Commit(span.request_id, base_len, tokens, len(tokens) if with_features else 0), first

    def _features(self, spans: list[RowSpan], picked: torch.Tensor | None, project: Projection | None) -> _Rows:
        """The spans' rows, projected in one call and copied to the host.  `picked`: those of all spans, in order."""
        if picked is None:
            return _Rows()
        projected = picked if project is None else project(picked)
        # vLLM has synchronised the stream to read the sampled tokens, so this copy waits for `fc` only.
        raw = projected.contiguous().cpu()
        row_bytes = raw.shape[-1] * raw.element_size()
        joined = raw.view(torch.uint8).view(-1).numpy().data
        of: dict[str, memoryview] = {}
        at = 0
        for span in spans:
            of[span.request_id] = joined[at : at + span.rows * row_bytes]
            at += span.rows * row_bytes
        return _Rows(of, DTYPE_NAMES[raw.dtype], raw.shape[-1], row_bytes)

    def take_counters(self) -> Shipped:
        """Counts since the last call."""
        taken, self._shipped = self._shipped, Shipped()
        return taken
