"""After an exchange of the target's weights, fetches the tensors that a head shares with its target.  Drafting thread.

Tensors come from a verifier, one after the other and in parts.  The verifier answers between two steps, and the drafter takes a
part between two batches, so that both go on meanwhile.  A drafter that gets no answer keeps its old tensors, and asks any
verifier with these weights that it hears from next.
"""

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.drafter.sessions import TORCH_DTYPES, Malformed, Session
from backend.wire.drafting import PROTOCOL_VERSION, Hello, Part, TargetTensor, Want

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""After so long without an answer, another verifier with these weights is asked."""


@dataclass
class _Fetch:
    """A fetch in progress."""

    hello: Hello
    """The greeting that named the weights."""
    session: Session
    names: list[TargetTensor]
    """Tensors still to come, the present one first."""
    found: dict[TargetTensor, Tensor | None]
    """Tensors of these weights that have come; None: it cannot be given."""
    asked_at: float
    first: int = 0
    data: bytearray = field(default_factory=bytearray)

    @property
    def want(self) -> Want:
        return Want(self.names[0], self.first)


class Following:
    """Fetches `names()`, the tensors that the present head shares with its target, and then passes all of them to `take`.

    `take` returns at once, and sees to it that they are put in place.
    """

    def __init__(self, names: Callable[[], Set[TargetTensor]], take: Callable[[dict[str, Tensor]], None]) -> None:
        self._names = names
        self._take = take
        self._have = Hello(PROTOCOL_VERSION, "", "drafts", 0)
        """The greeting that named the present weights; at first a made-up one with the weights of the start."""
        self._found: dict[TargetTensor, Tensor | None] = {}
        """As of a fetch, of the present weights."""
        self._fetch: _Fetch | None = None

    def greeted(self, session: Session, hello: Hello, now: float) -> Want | None:
        """A verifier has greeted, naming its weights.  Returns what to ask it for, if anything."""
        session.target = hello.target
        if not hello.weights:
            return None
        # Another head may share what the one before did not.
        found = {} if self._differs(hello) else dict(self._found)
        names = sorted(self._names() - found.keys())
        if not names:
            return None
        fetch = self._fetch
        if fetch is not None and fetch.hello.target == hello.target and fetch.hello.verifier_id != hello.verifier_id:
            return self.remind(session, now)
        self._fetch = _Fetch(hello, session, names, found, now)
        return self._fetch.want

    def remind(self, session: Session, now: float) -> Want | None:
        """What to ask this verifier for if another one has not answered in time."""
        fetch = self._fetch
        if fetch is None or now - fetch.asked_at < PATIENCE_S or session.target != fetch.hello.target:
            return None
        fetch.session, fetch.asked_at = session, now
        return fetch.want

    def receive(self, session: Session, part: Part, frames: Sequence[bytes], now: float) -> Want | None:
        """Takes a part.  Returns what to ask for next, if anything.  Raises `Malformed`."""
        fetch = self._fetch
        if fetch is None or fetch.session is not session or (part.name, part.first) != (fetch.names[0], fetch.first):
            return None
        if not part.of:
            logger.warning("%s has no %s to give: the head keeps the earlier one", session.verifier_id, part.name)
            fetch.found |= dict.fromkeys(fetch.names)
            self._end_fetch(fetch)
            return None
        dtype = TORCH_DTYPES[part.dtype]
        fits = 0 < part.rows <= part.of - part.first and part.width > 0
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
        self._end_fetch(fetch)
        self._take({name: tensor for name, tensor in fetch.found.items() if tensor is not None})
        return None

    def reset(self) -> None:
        """All sessions were dropped: gives up the fetch in progress."""
        self._fetch = None

    def _end_fetch(self, fetch: _Fetch) -> None:
        """All tensors of a fetch have come, or one cannot come."""
        self._have, self._found, self._fetch = fetch.hello, fetch.found, None

    def _differs(self, hello: Hello) -> bool:
        """Whether these weights are new here.  A verifier may reuse a name for other weights, with a new number."""
        have = self._have
        return hello.target != have.target or (hello.verifier_id == have.verifier_id and hello.weights != have.weights)
