"""A drafter's sessions, one per verifier and epoch, and the checks of what verifiers send.  Drafter thread.

A round is taken whole or refused whole, so that a refusal leaves every sequence as it was.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.drafter.nexts import Key
from backend.drafter.proposer import MAX_DRAFT, Proposer
from backend.speculation.chances import Rule
from backend.transport.ring import RingReader, RingRef
from backend.wire.drafting import HELLO_FIRST, Close, Commit, Next, Open, Round

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Malformed(Exception):
    """A message breaks the protocol.  The text says why, without repeating any content."""


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


def features_of(message: Round, frames: Sequence[bytes], proposer: Proposer, ring: RingReader | None) -> Tensor | None:
    """Checks a round and its frames; returns its features `[sum(rows), hidden]`, None when it has none.

    Raises `Malformed`.
    """
    rows = 0
    seen: set[str] = set()
    for item in message.items:
        if item.request_id in seen:
            raise Malformed("a request twice in one round")
        if isinstance(item, Close):
            continue
        seen.add(item.request_id)
        _check_item(item, proposer)
        rows += item.rows
    if len(frames) > 1:
        raise Malformed("too many frames")
    if rows and message.hidden != proposer.hidden:
        raise Malformed(f"features are {message.hidden} wide, this drafter takes {proposer.hidden}")
    dtype = TORCH_DTYPES[message.dtype]
    expected = rows * message.hidden * dtype.itemsize
    frame = _frame(message, frames, expected, ring)
    if len(frame) != expected:
        raise Malformed(f"the features frame has {len(frame)} bytes, not {expected}")
    if not expected:
        return None
    features = torch.frombuffer(frame, dtype=dtype).view(rows, message.hidden)
    # One bad row would spoil every sequence that shares its prefix.
    if not math.isfinite(float(features.sum(dtype=torch.float32))):
        raise Malformed("features are not finite")
    return features


def _frame(message: Round, frames: Sequence[bytes], expected: int, ring: RingReader | None) -> bytearray:
    """The raw features, copied: torch requires writable memory."""
    if message.at is None:
        return bytearray(frames[0] if frames else b"")
    if frames and frames[0]:
        raise Malformed("features in the message and in the ring")
    if ring is None:
        # The answer to a new greeting says whether the drafter reads the ring.
        raise Malformed(HELLO_FIRST)
    try:
        return ring.read(message.at, expected)
    except ValueError as error:
        raise Malformed(str(error)) from error


def check_next(message: Next, proposer: Proposer) -> None:
    """Checks a `Next`.  Raises `Malformed`."""
    if len({item.request_id for item in message.items}) != len(message.items):
        raise Malformed("a request twice in one message")
    if len(message.chance_weights) not in (0, len(Rule)):
        raise Malformed("chance_weights are for greedy requests, shared noise and independent drafts")
    if any(len(weights) < 3 or not all(map(math.isfinite, weights)) for weights in message.chance_weights):
        raise Malformed("a judge has at least three weights, all finite")
    for item in message.items:
        if len(item.verifying) > MAX_DRAFT:
            raise Malformed("a draft longer than any can be")
        if any(not 0 <= token < proposer.vocab_size for token in item.verifying):
            raise Malformed("a token outside the vocabulary")


def _check_item(item: Open | Commit, proposer: Proposer) -> None:
    known = len(item.tokens)
    if item.rows >= item.base_len:
        raise Malformed("base_len or rows out of range")
    if known > item.base_len or (isinstance(item, Open) and known != item.base_len):
        raise Malformed("base_len does not fit the tokens")
    if item.rows > known:
        raise Malformed("more rows than tokens")
    if known and not (min(item.tokens) >= 0 and max(item.tokens) < proposer.vocab_size):
        raise Malformed("a token outside the vocabulary")
