"""After an exchange of the target's weights, fetches the tensors that a head shares with its target.  Drafting thread.

Tensors come from a verifier, one after the other and in parts.  The verifier answers between two steps, and the drafter takes a
part between two batches, so that both go on meanwhile.  A drafter that gets no answer keeps its old tensors, and asks any
verifier with these weights that it hears from next.
"""

import logging
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from backend.drafter.sessions import TORCH_DTYPES, Malformed, Session
from backend.wire.drafting import Hello, Part, TargetTensor, Want

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""After so long without an answer, another verifier with these weights is asked."""


class Following:
    """Fetches `names()`, the tensors that the present head shares with its target, and then passes all of them to `take`.

    `take` returns at once, and sees to it that they are put in place.
    """

    def __init__(self, names: Callable[[], Set[TargetTensor]], take: Callable[[dict[str, Tensor]], None]) -> None:
        self._names = names
        self._take = take
        self._hello: Hello | None = None
        """The greeting that named the weights to follow; None: the weights of the start."""
        self._found: dict[TargetTensor, Tensor | None] = {}
        """Tensors of these weights that have come; None: it cannot be given."""
        self._rows, self._data = 0, bytearray()
        """What has come of the next tensor."""
        self._answering: Session | None = None
        """Who was asked and has not answered yet."""
        self._asked_at = 0.0

    def greeted(self, session: Session, hello: Hello, now: float) -> Want | None:
        """A verifier has greeted, naming its weights.  Returns what to ask it for, if anything."""
        session.target = hello.target
        if hello.weights and self._differs(hello):
            self.reset()
            self._hello, self._found = hello, {}
        return self.ask(session, now)

    def ask(self, session: Session, now: float) -> Want | None:
        """What to ask this verifier for: nothing while another one's answer may still come."""
        missing = self._missing()
        if not missing or self._hello is None or session.target != self._hello.target:
            return None
        if self._answering is not None and now - self._asked_at < PATIENCE_S:
            return None
        self._answering, self._asked_at = session, now
        return Want(missing[0], self._rows)

    def receive(self, session: Session, part: Part, frames: Sequence[bytes], now: float) -> Want | None:
        """Takes a part.  Returns what to ask for next, if anything.  Raises `Malformed`."""
        missing = self._missing()
        if self._answering is not session or part.name not in missing[:1] or part.first != self._rows:
            return None
        if not part.of:
            logger.warning("%s has no %s to give: the head keeps the earlier one", session.verifier_id, part.name)
            self._found |= dict.fromkeys(missing)
            self.reset()
            return None
        dtype = TORCH_DTYPES[part.dtype]
        fits = 0 < part.rows <= part.of - part.first and part.width > 0
        if not fits or len(frames) != 1 or len(frames[0]) != part.rows * part.width * dtype.itemsize:
            raise Malformed("a part of no tensor")
        self._data += frames[0]
        self._rows += part.rows
        self._answering = None
        if self._rows == part.of:
            data = self._data
            self.reset()
            if len(data) != part.of * part.width * dtype.itemsize:
                raise Malformed("parts of different tensors")
            whole = torch.frombuffer(data, dtype=dtype).view(part.of, part.width)
            self._found[part.name] = whole[0] if part.name == "norm.weight" else whole
            if len(missing) == 1:
                self._take({name: tensor for name, tensor in self._found.items() if tensor is not None})
        return self.ask(session, now)

    def reset(self) -> None:
        """Forgets the tensor under way and who was asked for it; those that came whole stay."""
        self._rows, self._data, self._answering = 0, bytearray(), None

    def _missing(self) -> list[TargetTensor]:
        """Which tensors still have to come, in the order in which they are fetched."""
        return sorted(self._names() - self._found.keys())

    def _differs(self, hello: Hello) -> bool:
        """Whether these weights are new here.  A verifier may reuse a name for other weights, with a new number."""
        known = self._hello
        if known is None or hello.target != known.target:
            return True
        return hello.verifier_id == known.verifier_id and hello.weights != known.weights
