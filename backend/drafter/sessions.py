"""A drafter's sessions, one per verifier and epoch, and the rounds that wait.  Drafter thread."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from backend.drafter.nexts import Key
from backend.transport.ring import RingReader, RingRef
from backend.wire.drafting import Round

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One verifier in one epoch; `features` and `drafts` are its sockets' identities."""

    verifier_id: str
    epoch: int
    features: bytes | None = None
    drafts: bytes | None = None
    ring: RingReader | None = None
    last_heard: float = 0.0
    target: str = ""
    """Name of the weights that the verifier runs (`Hello.target`)."""

    def map_ring(self, ref: RingRef | None) -> None:
        """Maps the shared-memory ring that a features socket offers.  Without a ring, features come in the messages."""
        self.close_ring()
        if ref is not None:
            try:
                self.ring = RingReader(ref)
            except (OSError, ValueError) as error:
                logger.info("the ring of %s is out of reach, its sockets serve: %s", self.verifier_id, error)

    def close_ring(self) -> None:
        """Unmaps the ring, if there is one."""
        if self.ring is not None:
            self.ring.close()
            self.ring = None


@dataclass(frozen=True)
class Waiting:
    """A round that waits for a batch."""

    session: Session
    message: Round
    features: Tensor | None
    arrived: float

    def key(self, request_id: str) -> Key:
        """How the drafter knows a request of this round."""
        return self.session.verifier_id, self.session.epoch, request_id
