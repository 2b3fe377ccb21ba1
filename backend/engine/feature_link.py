"""The worker's connection to one drafter: socket, ring, and how far each request's features have been sent.

Worker process, on the thread that runs the model; part of `features.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from backend.fleet import DrafterRef
from backend.transport import Dealer, RingWriter, Wire, connect_dealer
from backend.wire.drafting import (
    HELLO_FIRST,
    PROTOCOL_VERSION,
    Close,
    Hello,
    Refused,
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

Projection = Callable[[torch.Tensor], torch.Tensor]
"""Maps features of the target, `[rows, n * target_hidden]`, to what a drafter takes, `[rows, hidden]`."""


class FeatureLink:
    """The `features` socket to one drafter.  `next_row`: position of the first row not yet sent, by open request."""

    def __init__(
        self,
        wire: Wire,
        ref: DrafterRef,
        project: Projection | None,
        verifier_id: str,
        epoch: int,
        weights: int,
        ring_bytes: int,
    ) -> None:
        self.ref = ref
        self.project = project
        self._verifier_id, self._epoch, self._weights = verifier_id, epoch, weights
        # A ring needs one host, which an ipc address implies.
        self._ring_bytes = ring_bytes if ref.address.startswith("ipc://") else 0
        self._ring: RingWriter | None = None
        self._ring_is_read = False
        self.socket = Dealer(connect_dealer(wire, ref.address, ref.server_key, QUEUED_ROUNDS))
        self.next_row: dict[str, int] = {}
        self.cold: set[str] = set()
        """Requests whose earlier rows have yet to be handed over."""
        self.closed: list[Close] = []
        self._greet(time.monotonic())

    def leave(self, parts: Sequence[bytes | memoryview], size: int) -> int | None:
        """Writes a large frame of `size` bytes into the ring; returns its position, or None: it must travel in the message."""
        if self._ring is None or not self._ring_is_read or size < RING_FROM_BYTES:
            return None
        return self._ring.write(*parts)

    def close(self) -> None:
        self.socket.close()
        self._drop_ring()

    def receive_answers(self) -> bool:
        """Takes in the drafter's messages; returns whether it was greeted again."""
        greeted, now = False, time.monotonic()
        while (frames := self.socket.receive()) is not None:
            try:
                message = decode_to_verifier(frames[0])
            except msgspec.DecodeError:
                continue
            if isinstance(message, Unknown):
                for request_id in message.request_ids:
                    self.next_row.pop(request_id, None)
            elif isinstance(message, Welcome):
                self._ring_is_read = message.ring
                if not message.ring:
                    self._drop_ring()
            elif isinstance(message, Refused) and message.reason == HELLO_FIRST and now - self._greeted_at >= GREET_EVERY_S:
                greeted = True
                # If the drafter has lost the connection alone, they are open there.
                self.closed += [Close(request_id, "moved") for request_id in self.next_row]
                self.next_row.clear()
                self.cold.clear()
                self._greet(now)
        return greeted

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
        hello = Hello(PROTOCOL_VERSION, self._verifier_id, "features", self._epoch, ring, self._weights)
        self.socket.send(encode(hello))

    def _drop_ring(self) -> None:
        self._ring_is_read = False
        if self._ring is not None:
            self._ring.close()
            self._ring = None
