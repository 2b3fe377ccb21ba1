"""Ships features to the drafters: the worker's half of the drafting wire.

Runs in the worker's process (tensor-parallel rank 0 alone) on the thread that runs the model.  Per engine step and drafter one
`Round` leaves: for each request the rows the target has just computed, projected by the EAGLE head's `fc` so that one hidden
width and not three crosses the wire.  Sending never blocks: when a drafter's queue is full the round is dropped, the drafter
keeps a gap, and the request loses acceptance, nothing else.

What comes back on these sockets is read once per step: a drafter that does not know us any more is greeted again, and requests
it does not know are opened again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch

from backend.drafter.head_config import CheckpointError
from backend.fleet import DrafterRef
from backend.protocol import (
    HELLO_FIRST,
    PROTOCOL_VERSION,
    Close,
    Commit,
    FeatureDtype,
    Hello,
    Open,
    Refused,
    Round,
    Unknown,
    decode_to_verifier,
    encode,
)
from backend.transport import Dealer, Wire, connect_dealer
from backend.verifier.pairing import drafter_for

logger = logging.getLogger(__name__)

QUEUED_ROUNDS = 64
"""Rounds that may wait for a drafter that does not read; further ones are dropped."""

GREET_EVERY_S = 0.5
"""A drafter that refuses every round until it is greeted is greeted this often at most."""

DTYPE_NAMES: dict[torch.dtype, FeatureDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


Projection = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Span:
    """What one request computed in this step.

    Rows `offset .. offset + rows - 1` of the step's hidden states are the features of positions `start .. start + rows - 1`,
    all of them final (rejected draft positions are not part of it).  `tokens(a, b)` gives the request's token ids `a .. b-1`.
    """

    request_id: str
    start: int
    offset: int
    rows: int
    wants_draft: bool
    tokens: Callable[[int, int], list[int]]


@dataclass(frozen=True)
class Shipped:
    """Bytes sent and rounds dropped at a full queue, per drafter, and the drafters that were greeted again."""

    bytes_sent: dict[str, int] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)
    greeted: list[str] = field(default_factory=list)


class _Link:
    """One drafter: its socket, and how far each request's features have been shipped to it."""

    def __init__(
        self, wire: Wire, ref: DrafterRef, project: Projection | None, verifier_id: str, epoch: int, weights: int
    ) -> None:
        self.ref = ref
        self.project = project
        identity = f"{verifier_id}/features/{epoch}".encode()
        self.socket = Dealer(connect_dealer(wire, ref.address, identity, ref.server_key, QUEUED_ROUNDS))
        self.next_row: dict[str, int] = {}
        self.closed: list[Close] = []
        self._hello = encode(Hello(PROTOCOL_VERSION, verifier_id, "features", epoch, weights))
        self._greeted_at = time.monotonic()
        self.socket.send(self._hello)

    def listen(self) -> bool:
        """Reads what the drafter says to this socket; True when it was greeted again."""
        greeted = False
        while (frames := self.socket.receive()) is not None:
            try:
                message = decode_to_verifier(frames[0])
            except msgspec.DecodeError:
                continue
            if isinstance(message, Unknown):
                for request_id in message.request_ids:
                    self.next_row.pop(request_id, None)
            elif isinstance(message, Refused) and message.reason == HELLO_FIRST:
                greeted |= self._greet_again(time.monotonic())
        return greeted

    def _greet_again(self, now: float) -> bool:
        if now - self._greeted_at < GREET_EVERY_S:
            return False
        self._greeted_at = now
        self.next_row.clear()
        self.closed.clear()
        self.socket.send(self._hello)
        return True


class FeatureShipper:
    """The sockets to all drafters of this verifier, and what each knows of each request."""

    k: int = 0
    """Draft tokens to ask for in the next round."""
    trace_of: Callable[[str], str] = staticmethod(lambda request_id: "")
    """The trace context of a request; asked once, when it is opened on a drafter."""

    def __init__(self, verifier_id: str, projection: Callable[[str], Projection | None]) -> None:
        """`projection(head)` is what is applied to features for drafters with that head; see `DrafterRef.head`."""
        self._verifier_id = verifier_id
        self._projection = projection
        self._weights = 0
        self._links: dict[str, _Link] = {}
        self._assigned: list[str] = []
        """As the scheduler has it, those without a link included: both must choose the same drafter for a request."""
        self._epoch = 0
        self._seq = 0
        self.bytes_sent: dict[str, int] = {}
        self.overflows: dict[str, int] = {}
        self.greeted: set[str] = set()
        """Drafters that had to be greeted again."""

    def set_drafters(self, wire: Wire, refs: list[DrafterRef], epoch: int, weights: int = 0) -> None:
        """Connects to new drafters, leaves those no longer assigned.  `epoch` is shared with the scheduler's sockets.

        With other `weights` of the target every drafter is connected to anew.
        """
        wanted = {ref.id: ref for ref in refs}
        for drafter_id, link in list(self._links.items()):
            if wanted.get(drafter_id) != link.ref or weights != self._weights:
                link.socket.close()
                del self._links[drafter_id]
        self._epoch, self._weights = epoch, weights
        self._assigned = sorted(wanted)
        for ref in refs:
            if ref.id not in self._links:
                try:
                    project = self._projection(ref.head)
                except CheckpointError as error:
                    # It would draft from what it takes for features: rather no drafts.
                    logger.error("drafter %s is not used: %s", ref.id, error)
                    continue
                self._links[ref.id] = _Link(wire, ref, project, self._verifier_id, epoch, weights)

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests are over; drafters are told with the next round."""
        for request_id in request_ids:
            for link in self._links.values():
                if link.next_row.pop(request_id, None) is not None:
                    link.closed.append(Close(request_id, "finished"))

    def ship(self, spans: list[Span], hidden: torch.Tensor | None) -> None:
        """Sends this step's rows.  `hidden`: `[num_tokens, width]` before `fc`, or None when drafters need no features."""
        drafter_ids = self._assigned
        by_drafter: dict[str, list[Span]] = {drafter_id: [] for drafter_id in drafter_ids}
        for span in spans:
            chosen = drafter_for(span.request_id, drafter_ids)
            if chosen is not None:
                by_drafter[chosen].append(span)
        for drafter_id, its_spans in by_drafter.items():
            link = self._links.get(drafter_id)
            if link is None:
                continue
            if link.listen():
                self.greeted.add(drafter_id)
            if its_spans or link.closed:
                self._ship_to(link, its_spans, hidden)

    def _ship_to(self, link: _Link, spans: list[Span], hidden: torch.Tensor | None) -> None:
        items: list[Open | Commit | Close] = list(link.closed)
        link.closed.clear()
        rows: list[int] = []
        for span in spans:
            item, first = self._item(link, span, hidden is not None)
            items.append(item)
            rows.extend(range(span.offset + first, span.offset + span.rows))
        frame, dtype, width = _features(hidden, rows, link.project)
        self._seq += 1
        header = encode(Round(self._epoch, self._seq, dtype, width, items))
        drafter_id = link.ref.id
        if link.socket.send(header, frame):
            self.bytes_sent[drafter_id] = self.bytes_sent.get(drafter_id, 0) + len(header) + len(frame)
            return
        self.overflows[drafter_id] = self.overflows.get(drafter_id, 0) + 1
        for unsent in items:
            if isinstance(unsent, Open):
                link.next_row.pop(unsent.request_id, None)
            elif isinstance(unsent, Close):
                link.closed.append(unsent)

    def _item(self, link: _Link, span: Span, with_features: bool) -> tuple[Open | Commit, int]:
        """The message for one request and the first row of its span that the drafter does not have yet."""
        base_len = span.start + span.rows + 1
        k = self.k if span.wants_draft else 0
        known = link.next_row.get(span.request_id)
        link.next_row[span.request_id] = max(span.start + span.rows, known or 0)
        if known is None:
            rows = span.rows if with_features else 0
            return Open(span.request_id, base_len, span.tokens(0, base_len), rows, k, self.trace_of(span.request_id)), 0
        first = min(max(known - span.start, 0), span.rows)
        tokens = span.tokens(span.start + first + 1, base_len)
        return Commit(span.request_id, base_len, tokens, len(tokens) if with_features else 0, k), first

    def take_counters(self) -> Shipped:
        """What happened since the last call."""
        taken = Shipped(self.bytes_sent, self.overflows, sorted(self.greeted))
        self.bytes_sent, self.overflows, self.greeted = {}, {}, set()
        return taken


def _features(hidden: torch.Tensor | None, rows: list[int], project: Projection | None) -> tuple[bytes, FeatureDtype, int]:
    if hidden is None:
        return b"", "float32", 0
    picked = hidden[torch.tensor(rows, device=hidden.device, dtype=torch.long)]
    projected = picked if project is None else project(picked)
    # The step's own read-back of the sampled tokens has already synchronised the stream: this copy waits for `fc` alone.
    raw = projected.contiguous().cpu()
    return raw.view(torch.uint8).numpy().tobytes(), DTYPE_NAMES[raw.dtype], projected.shape[-1]
