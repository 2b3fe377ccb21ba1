"""One drafter as the worker sees it: its socket, its ring, and how far each request's features have been shipped to it.

Worker's process, on the thread that runs the model; part of `features.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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
"""Rounds that may wait for a drafter that does not read; further ones are dropped."""

RING_FROM_BYTES = 65536
"""Smaller frames go with the message: up to here the socket is as quick."""

GREET_EVERY_S = 0.5
"""A drafter that refuses every round until it is greeted is greeted this often at most."""

Projection = Callable[[torch.Tensor], torch.Tensor]
"""Features of the target, `[rows, n * target_hidden]`, as a drafter takes them: `[rows, hidden]`."""


class FeatureLink:
    """One drafter: its socket, and how far each request's features have been shipped to it."""

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
        # Only on one host, which an ipc address says.
        self._ring_bytes = ring_bytes if ref.address.startswith("ipc://") else 0
        self._ring: RingWriter | None = None
        self._ring_is_read = False
        identity = f"{verifier_id}/features/{epoch}".encode()
        self.socket = Dealer(connect_dealer(wire, ref.address, identity, ref.server_key, QUEUED_ROUNDS))
        self.next_row: dict[str, int] = {}
        self.cold: set[str] = set()
        """Requests whose earlier rows are to be handed over yet."""
        self.closed: list[Close] = []
        self._greet(time.monotonic())

    def leave(self, frame: bytes) -> int | None:
        """Puts a large frame into the ring; None where it has to travel in the message."""
        if self._ring is None or not self._ring_is_read or len(frame) < RING_FROM_BYTES:
            return None
        return self._ring.write(frame)

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()
        self._drop_ring()

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
            elif isinstance(message, Welcome):
                self._ring_is_read = message.ring
                if not message.ring:
                    self._drop_ring()
            elif isinstance(message, Refused) and message.reason == HELLO_FIRST:
                greeted |= self._greet_again(time.monotonic())
        return greeted

    def _greet_again(self, now: float) -> bool:
        if now - self._greeted_at < GREET_EVERY_S:
            return False
        self.next_row.clear()
        self.cold.clear()
        self.closed.clear()
        self._greet(now)
        return True

    def _greet(self, now: float) -> None:
        """Offers a new ring each time: how much of an old one was read is not known."""
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
