"""The worker's connection to one drafter: socket, ring, and which rows of each request have been sent.

Worker process, on the thread that runs the model; part of `features.py`.
"""

import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from backend.engine.row_log import Projection, RowFormat
from backend.fleet import DrafterRef
from backend.transport import Dealer, RingWriter, Wire, connect_dealer
from backend.wire.drafting import (
    HELLO_FIRST,
    Close,
    Commit,
    Hello,
    Next,
    Open,
    Refused,
    Round,
    Unknown,
    Welcome,
    decode_to_verifier,
    encode,
)

logger = logging.getLogger(__name__)

QUEUED_ROUNDS = 64
"""Rounds that may queue for a drafter that does not read; further rounds are dropped."""

RING_FROM_BYTES = 65536
"""Bytes.  Smaller frames travel in the message: up to this size the socket is as fast as the ring."""

GREET_EVERY_S = 0.5
"""Shortest time between two greetings of a drafter, which refuses every round until it is greeted."""


class Piece(NamedTuple):
    """A message about one request, and its rows."""

    item: Open | Commit
    rows: list[memoryview]
    sent: range
    """See `FeatureLink.sent`, once it is sent."""


class FeatureLink:
    """The `features` socket to one drafter."""

    def __init__(self, wire: Wire, ref: DrafterRef, project: Projection | None, hello: Hello, ring_bytes: int) -> None:
        self.ref, self.project, self.hello = ref, project, hello
        # A ring needs one host, which an ipc address implies.
        self._ring_bytes = ring_bytes if ref.address.startswith("ipc://") else 0
        self._ring: RingWriter | None = None
        self._ring_is_read = False
        self.socket = Dealer(connect_dealer(wire, ref.address, ref.server_key, QUEUED_ROUNDS))
        self.sent: dict[str, range] = {}
        """By open request, the positions of the rows that were sent, from the last gap on."""
        self.closed: list[Close] = []
        self._greet(time.monotonic())

    def send(self, pieces: list[Piece], row_format: RowFormat, following: Next | None) -> int | None:
        """Sends a round, pending `Close` items first.  Returns its bytes, or None if the drafter's queue is full."""
        rows, at = [view for piece in pieces for view in piece.rows], None
        size = sum(map(len, rows))
        if self._ring is not None and self._ring_is_read and size >= RING_FROM_BYTES:
            at = self._ring.write(*rows)
        items = [*self.closed, *(piece.item for piece in pieces)]
        header = encode(Round(row_format.dtype, row_format.width, items, at, following))
        if not self.socket.send(header, b"".join(rows) if at is None else b""):
            return None
        self.closed.clear()
        self.sent.update((piece.item.request_id, piece.sent) for piece in pieces)
        return len(header) + size

    def forget(self, request_ids: Iterable[str], reason: str) -> None:
        """The next round closes those of these requests that are open."""
        self.closed += [Close(each, reason) for each in request_ids if self.sent.pop(each, None) is not None]

    def close(self) -> None:
        self.socket.close()
        self._drop_ring()

    def receive_answers(self) -> None:
        """Takes in the drafter's messages."""
        now = time.monotonic()
        while (frames := self.socket.receive()) is not None:
            try:
                message = decode_to_verifier(frames[0])
            except msgspec.DecodeError:
                continue
            if isinstance(message, Unknown):
                for request_id in message.request_ids:
                    self.sent.pop(request_id, None)
            elif isinstance(message, Welcome):
                self._ring_is_read = message.ring
                if not message.ring:
                    self._drop_ring()
            elif isinstance(message, Refused) and message.reason == HELLO_FIRST and now - self._greeted_at >= GREET_EVERY_S:
                # If the drafter has lost the connection alone, they are open there.
                self.forget(list(self.sent), "moved")
                self._greet(now)

    def _greet(self, now: float) -> None:
        """Sends `Hello` and offers a new ring: how much the drafter has read of an old ring is unknown."""
        self._greeted_at = now
        self._drop_ring()
        if self._ring_bytes:
            try:
                self._ring = RingWriter(self._ring_bytes)
            except OSError as error:
                logger.warning("no shared memory for features, sockets serve: %s", error)
        ring = None if self._ring is None else self._ring.ref
        self.socket.send(encode(msgspec.structs.replace(self.hello, ring=ring)))

    def _drop_ring(self) -> None:
        self._ring_is_read = False
        if self._ring is not None:
            self._ring.close()
            self._ring = None
