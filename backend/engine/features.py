"""Sends features to the drafters: the worker's half of the drafting wire.

Worker process (tensor-parallel rank 0 only), on the thread that runs the model.  In each engine step, one `Round` goes to each
drafter.  It holds, per request, the rows that the drafter lacks: those of the request's log (`row_log.py`) behind the rows that
it was sent (`FeatureLink.sent`).  The EAGLE head's `fc` projects rows first, so one hidden width crosses the wire instead of
three.  Sending never blocks.  When a drafter's queue is full, the round is dropped, and its rows go with the next one.

A drafter that is new to a request (just assigned, restarted, or replacing another one) lacks the whole log.  Once it has that,
its drafts are accepted as often as its predecessor's.  The earlier rows sent per step are limited.  Until its turn comes, a
request is drafted for without that context.

Answers on these sockets are read once per step.  A drafter that has forgotten this verifier is greeted again; requests that it
has forgotten are opened again.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from backend.engine.feature_link import FeatureLink, Piece
from backend.engine.row_log import NO_ROWS, Log, Projection, RowFormat, RowLogs, StepRows, next_row
from backend.fleet import DraftCounters, DrafterRef
from backend.models.head_config import CheckpointError
from backend.speculation.pairing import Pairing, key_of
from backend.transport import Wire
from backend.wire.drafting import PROTOCOL_VERSION, Commit, Hello, Next, NextItem, Open

logger = logging.getLogger(__name__)

HANDOVER_ROWS = 8192
"""Earlier rows sent to one drafter per step, and rows per message; with more, other requests' drafts would wait longer."""


class FeatureShipper:
    """The `features` sockets to all drafters, and the rows that go there."""

    features_needed: bool = True
    """Whether drafters need the rows now, not later."""
    asks: Mapping[str, tuple[int, float]] = {}
    chance_weights: Mapping[str, list[list[float]]] = {}
    """See `StepOrders`."""
    opening: Callable[[str, list[int], int], Open] = staticmethod(
        lambda name, tokens, rows: Open(name, len(tokens), tokens, rows)
    )
    """Makes the message that opens a request on a drafter, with its tokens and number of rows."""

    def __init__(self, projection: Callable[[str], Projection | None], ring_bytes: int = 0, handover_bytes: int = 0) -> None:
        """`projection(head)` is applied to features for drafters that connect with that head (`DrafterRef.head`).

        Raises what it raises for the fleet's own head.
        """
        self._projection = projection
        self._own = projection("")
        """Of the fleet's own head, as the latest drafter with it has read it."""
        self._ring_bytes, self._handover_bytes = ring_bytes, handover_bytes
        self._weights = 0
        self._assigned: dict[str, str] = {}
        """Drafter id to head.  Copies the scheduler's table, including drafters that could not be connected; otherwise both
        sides would choose different drafters for a request."""
        self.pairings: dict[str, Pairing] = {}
        """By request, as the scheduler has decided.  One that is not there is paired by its own name."""
        self._drafters: dict[str, str | None] = {}
        """The drafter of each request under the present assignment."""
        self._logs = RowLogs(handover_bytes, self._projection_of)
        self._links: dict[str, FeatureLink] = {}
        self._counters = defaultdict[str, DraftCounters](DraftCounters)

    def set_drafters(self, wire: Wire, verifier_id: str, epochs: Mapping[DrafterRef, int], weights: int = 0) -> None:
        """Connects to new drafters and leaves those no longer assigned.  The scheduler's sockets have the same epochs.

        After a change of `weights`, all epochs are new, and features of the old weights are dropped.
        """
        for drafter_id, link in list(self._links.items()):
            if epochs.get(link.ref) != link.hello.epoch:
                link.close()
                del self._links[drafter_id]
        if weights != self._weights:
            self._weights, self._logs = weights, RowLogs(self._handover_bytes, self._projection_of)
        self._assigned, self._drafters = {ref.id: ref.head for ref in epochs}, {}
        for ref, epoch in epochs.items():
            if ref.id not in self._links:
                self._connect(wire, verifier_id, ref, epoch)
        for drafter_id, link in self._links.items():
            # A request that comes back is opened again, because this drafter has missed what happened meanwhile.
            link.forget([r for r in link.sent if self._drafter_of(r) != drafter_id], "moved")

    def _connect(self, wire: Wire, verifier_id: str, ref: DrafterRef, epoch: int) -> None:
        try:
            project = self._projection(ref.head) if ref.takes_features else None
        except (CheckpointError, OSError) as error:
            # Without its projection the drafter would get wrong features; no drafts are better.
            logger.error("drafter %s is not used: %s", ref.id, error)
            return
        if ref.takes_features and not ref.head:
            self._own = project
        hello = Hello(PROTOCOL_VERSION, verifier_id, "features", epoch, weights=self._weights)
        self._links[ref.id] = FeatureLink(wire, ref, project, hello, self._ring_bytes)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that have ended; drafters learn of it with the next round."""
        over = list(request_ids)
        if not over:
            return
        self._logs.forget(over)
        for request_id in over:
            self.pairings.pop(request_id, None)
            self._drafters.pop(request_id, None)
        for link in self._links.values():
            link.forget(over, "finished")

    def begin(self, step: StepRows, layers: Sequence[torch.Tensor], is_early: bool) -> None:
        """Takes a step's features while the device computes or has tokens to sample; which are final is not known yet.

        `layers`: each `[num_tokens, width]`; side by side they are the features before `fc`.  If drafters are in no hurry, it
        sends what earlier steps have left, but not in a step that begins early: its requests' tokens are not known.
        """
        self._logs.begin(step.request_ids, sum(step.computed), layers, self.features_needed)
        if self._logs.fresh and not self.features_needed and not is_early:
            self.ship(step)

    def end(self, step: StepRows) -> None:
        """Says which of the rows are final.  If drafters need them now, it sends them."""
        self._logs.end(step)
        if self.features_needed:
            self.ship(step)

    def ship(self, step: StepRows) -> None:
        """Sends each drafter what it lacks of the step's requests, up to their final rows."""
        fresh, self._logs.fresh = self._logs.fresh, {}
        drafters = [self._drafter_of(request_id) for request_id in step.request_ids]
        for drafter_id, link in self._links.items():
            link.receive_answers()
            places = [i for i, chosen in enumerate(drafters) if chosen == drafter_id]
            self._ship_to(link, step, places, fresh if link.ref.takes_features else None)
        self._logs.trim()

    def _drafter_of(self, request_id: str) -> str | None:
        if request_id not in self._drafters:
            pairing = self.pairings.get(request_id) or Pairing(key_of(request_id))
            self._drafters[request_id] = pairing.drafter(self._assigned)
        return self._drafters[request_id]

    def _projection_of(self, request_id: str) -> Projection | None:
        """That of the request's drafter; the fleet's own if there is none, or it takes no features."""
        link = self._links.get(self._drafter_of(request_id) or "")
        return link.project if link is not None and link.ref.takes_features else self._own

    def _ship_to(self, link: FeatureLink, step: StepRows, places: list[int], fresh: dict[str, int] | None) -> None:
        """Sends one drafter what it lacks of these requests.  `fresh`: see `RowLogs`; None: it takes tokens only."""
        counters, row_format, room = self._counters[link.ref.id], RowFormat(), HANDOVER_ROWS
        rounds: list[list[Piece]] = []
        last: list[Piece] = []
        for i in places:
            request_id = step.request_ids[i]
            sent, end, log, own = link.sent.get(request_id), step.starts[i] + step.counts[i], NO_ROWS, 0
            if fresh is not None:
                log = self._logs.get(request_id, NO_ROWS)
                # Rows of a step that began early may have been projected for another head: they begin anew with the next ones.
                if request_id not in fresh or log.project is not link.project:
                    continue
                end = min(end, log.end)  # Later rows may wait.
                own = min(fresh[request_id], end)
            # One request may have more earlier rows than the limit, or they would never be sent.
            at = next_row(sent, log.start, own, room if room < HANDOVER_ROWS else None)
            earlier, row_format = max(own - at, 0), log.format
            room -= earlier
            if earlier and (sent is None or at < sent.stop):
                counters.handovers += 1
                counters.handover_rows += earlier
                counters.handover_bytes += earlier * row_format.row_bytes
            for piece in self._pieces(step, i, log, sent, range(at, end)):
                if piece.sent.stop < end:
                    rounds.append([piece])
                else:
                    last.append(piece)
        # `Open` begins a request anew.  A `Close` before it would also end what is asked of the drafter in these rounds.
        if link.closed:
            opened = {piece.item.request_id for each in (*rounds, last) for piece in each if isinstance(piece.item, Open)}
            link.closed = [each for each in link.closed if each.request_id not in opened]
        for each in (*rounds, last) if last or link.closed else ():
            size = link.send(each, row_format, self._next(link, last) if each is last else None)
            if size is None:
                counters.dropped["overflow"] = counters.dropped.get("overflow", 0) + 1
                return
            counters.bytes_sent += size

    def _next(self, link: FeatureLink, pieces: list[Piece]) -> Next | None:
        """What to draft for these requests at once."""
        asks = ((piece.item, *self.asks[piece.item.request_id]) for piece in pieces if piece.item.request_id in self.asks)
        items = [NextItem(item.request_id, item.base_len, k, [], 0, floor, k) for item, k, floor in asks]
        return Next(items, self.chance_weights.get(link.ref.id, [])) if items else None

    def _pieces(self, step: StepRows, i: int, log: Log, sent: range | None, lacking: range) -> Iterator[Piece]:
        """Request i's rows of the positions `lacking`, for a drafter that has the rows `sent`."""
        request_id = step.request_ids[i]
        item: Open | Commit
        for first in lacking[::HANDOVER_ROWS]:
            upto = min(first + HANDOVER_ROWS, lacking.stop)
            rows = upto - first if log.format.width else 0
            if sent is None or first < sent.stop:
                item, sent = self.opening(request_id, step.tokens(i, 0, upto + 1), rows), range(first, upto)
            else:
                item = Commit(request_id, upto + 1, step.tokens(i, sent.stop + 1, upto + 1), rows)
                sent = range(sent.start if first == sent.stop else first, upto)
            yield Piece(item, log.part(first, upto), sent)

    def take_counters(self) -> dict[str, DraftCounters]:
        """Bytes sent, hand-overs, and rounds dropped because a queue was full, by drafter since the last call."""
        taken, self._counters = self._counters, defaultdict(DraftCounters)
        return taken
