"""Checks messages of verifiers before they are used.  Pure but for torch's view of the raw frame; drafter thread.

A round is taken whole or refused whole, so that a refusal leaves every sequence as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from backend.drafter.proposer import MAX_DRAFT, Proposer
from backend.speculation.chances import Rule
from backend.transport.ring import RingReader
from backend.wire.drafting import HELLO_FIRST, Close, Commit, Next, Open, Round

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Malformed(Exception):
    """A message breaks the protocol.  The text says why, without repeating any content."""


def features_of(message: Round, frames: Sequence[bytes], proposer: Proposer, ring: RingReader | None) -> Tensor | None:
    """Checks a round and its frames; returns its features `[sum(rows), hidden]`, None when it has none.

    Raises `Malformed`.
    """
    rows = 0
    asked: set[str] = set()
    for item in message.items:
        if item.request_id in asked:
            raise Malformed("a request twice in one round")
        if isinstance(item, Close):
            continue
        asked.add(item.request_id)
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
        if item.base_len < 1 or item.k < 0 or item.outcomes < 0 or not 0 <= item.floor <= 1:
            raise Malformed("base_len, k, outcomes or floor out of range")
        if len(item.verifying) > MAX_DRAFT:
            raise Malformed("a draft longer than any can be")
        if any(not 0 <= token < proposer.vocab_size for token in item.verifying):
            raise Malformed("a token outside the vocabulary")


def _check_item(item: Open | Commit, proposer: Proposer) -> None:
    known = len(item.tokens)
    if item.base_len < 1 or not 0 <= item.rows < item.base_len:
        raise Malformed("base_len or rows out of range")
    if isinstance(item, Open) and not (0 <= item.seed < 1 << 64 and 0 <= item.temperature < math.inf):
        raise Malformed("seed or temperature out of range")
    if isinstance(item, Open) and not (item.top_k >= -1 and 0 <= item.top_p <= 1 and 0 <= item.min_p <= 1):
        raise Malformed("top_k, top_p or min_p out of range")
    if known > item.base_len or (isinstance(item, Open) and known != item.base_len):
        raise Malformed("base_len does not fit the tokens")
    if item.rows > known:
        raise Malformed("more rows than tokens")
    if known and not (min(item.tokens) >= 0 and max(item.tokens) < proposer.vocab_size):
        raise Malformed("a token outside the vocabulary")
