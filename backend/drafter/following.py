"""Fetches what a head shares with its target from a verifier whose weights were exchanged.  Drafting thread.

One tensor after the other, one part at a time: the verifier answers between two steps and the drafter takes it between two
batches, so that both go on meanwhile.  A drafter that gets no answer keeps what it has, and asks again when it hears of anyone
who runs these weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.drafter.intake import TORCH_DTYPES, Malformed
from backend.drafter.sessions import Session
from backend.wire.drafting import Hello, Part, TargetTensor, Want

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Without an answer for so long, whoever comes along is asked."""
ROWS, WIDTH = 1 << 22, 1 << 17
"""No matrix of a target is larger."""


@dataclass(frozen=True)
class _Known:
    """Weights of a target, as a verifier has greeted with them."""

    target: str
    verifier_id: str = ""
    weights: int = 0


@dataclass
class _Fetch:
    """What is asked for, and what has come of it."""

    known: _Known
    session: Session
    names: list[TargetTensor]
    """Still to come, the one at hand first."""
    asked_at: float
    first: int = 0
    data: bytearray = field(default_factory=bytearray)
    found: dict[str, Tensor] = field(default_factory=dict)

    @property
    def want(self) -> Want:
        return Want(self.names[0], self.first)


class Following:
    """`names()`: the tensors that the present head shares with its target.  `take` is given all of them when they are there."""

    def __init__(self, names: Callable[[], Collection[TargetTensor]], take: Callable[[dict[str, Tensor]], None]) -> None:
        self._names = names
        self._take = take
        self._have = _Known("")
        self._fetch: _Fetch | None = None

    def greeted(self, session: Session, hello: Hello, now: float) -> Want | None:
        """A verifier has said which weights it runs; what to ask it for."""
        session.target = hello.target
        known = _Known(hello.target, hello.verifier_id, hello.weights)
        if not hello.weights or not self._differs(known):
            return None
        fetch = self._fetch
        if fetch is not None and fetch.known.target == hello.target and fetch.known.verifier_id != hello.verifier_id:
            return self.remind(session, now)
        names = sorted(self._names())
        self._fetch = _Fetch(known, session, names, now) if names else None
        return self._fetch.want if self._fetch is not None else None

    def remind(self, session: Session, now: float) -> Want | None:
        """What to ask this verifier for, where another has not answered."""
        fetch = self._fetch
        if fetch is None or now - fetch.asked_at < PATIENCE_S or session.target != fetch.known.target:
            return None
        fetch.session, fetch.asked_at = session, now
        return fetch.want

    def receive(self, session: Session, part: Part, frames: Sequence[bytes], now: float) -> Want | None:
        """Takes a part; what to ask for next.  Raises `Malformed`."""
        fetch = self._fetch
        if fetch is None or fetch.session is not session or (part.name, part.first) != (fetch.names[0], fetch.first):
            return None
        if not part.of:
            logger.warning("%s has no %s to give: the head keeps the earlier one", session.verifier_id, part.name)
            self._have, self._fetch = fetch.known, None
            return None
        dtype = TORCH_DTYPES[part.dtype]
        fits = 0 < part.rows <= part.of - part.first and part.of <= ROWS and 0 < part.width <= WIDTH
        if not fits or len(frames) != 1 or len(frames[0]) != part.rows * part.width * dtype.itemsize:
            raise Malformed("a part of no tensor")
        fetch.data += frames[0]
        fetch.first += part.rows
        fetch.asked_at = now
        if fetch.first < part.of:
            return fetch.want
        if len(fetch.data) != part.of * part.width * dtype.itemsize:
            self._fetch = None
            raise Malformed("parts of different tensors")
        whole = torch.frombuffer(fetch.data, dtype=dtype).view(part.of, part.width)
        fetch.found[part.name] = whole[0] if part.name == "norm.weight" else whole
        fetch.names.pop(0)
        fetch.first, fetch.data = 0, bytearray()
        if fetch.names:
            return fetch.want
        self._have, self._fetch = fetch.known, None
        self._take(fetch.found)
        return None

    def reset(self) -> None:
        """Nobody is known any more."""
        self._fetch = None

    def _differs(self, known: _Known) -> bool:
        """Names may be given twice: a verifier that has exchanged its weights since has others."""
        have = self._have
        return known.target != have.target or (known.verifier_id == have.verifier_id and known.weights != have.weights)
