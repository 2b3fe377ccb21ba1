"""Which of several different draft models drafts for a request: the one that brought requests of its kind the most tokens.

Pure; the scheduler's process and thread.  Drafters with the same head (`Member.head`) are one choice, and share its requests by
`pairing.py`.  A request keeps its head for life, because another one would have to read all of its text first.  A kind is an
adapter and a cluster of prompts that use the same words.  What counts is tokens per verification while drafters are asked: a
draft that is late or stays out counts as none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.speculation.pairing import having

WINDOW = 512
"""Verifications that a mean remembers."""
TRIED = 64
"""Verifications of a kind that each head gets before it is judged."""
TRY_ONE_IN = 16
"""After that, of so many requests of a kind one goes to the head that is known least."""
KINDS = 256
"""Kinds remembered."""
BUCKETS, READ = 1024, 512
"""A prompt's last tokens are counted by their remainders."""
ALIKE = 0.6
"""Cosine from which on a prompt belongs to a cluster."""
CLUSTERS = 16


class Clusters:
    """Prompts by the tokens they use; new clusters begin until there are `CLUSTERS`."""

    def __init__(self) -> None:
        self._centres: npt.NDArray[np.float64] = np.zeros((0, BUCKETS))

    def of(self, prompt: Sequence[int]) -> int:
        """A prompt's cluster, which moves a little towards it."""
        counts = np.bincount(np.asarray(prompt[-READ:], dtype=np.int64) % BUCKETS, minlength=BUCKETS)
        # The root keeps line breaks and commas from deciding.
        signature = np.sqrt(counts)
        signature /= max(float(np.linalg.norm(signature)), 1e-9)
        alike = self._centres @ signature
        nearest = int(alike.argmax()) if len(alike) else -1
        if nearest < 0 or (alike[nearest] < ALIKE and len(alike) < CLUSTERS):
            self._centres = np.vstack((self._centres, signature))
            return len(self._centres) - 1
        moved = self._centres[nearest] + 0.1 * signature
        self._centres[nearest] = moved / np.linalg.norm(moved)
        return nearest


@dataclass
class Brought:
    """What a head has brought one kind of requests, in verifications of late."""

    requests: int = 0
    verifications: float = 0.0
    tokens: float = 0.0

    def learn(self, tokens: int) -> None:
        """One more verification."""
        kept = 1 - 1 / WINDOW
        self.verifications = self.verifications * kept + 1
        self.tokens = self.tokens * kept + tokens

    @property
    def mean(self) -> float:
        """Tokens per verification."""
        return self.tokens / self.verifications if self.verifications else 0.0


@dataclass
class Kind:
    """One kind of requests."""

    requests: int = 0
    brought: dict[str, Brought] = field(default_factory=dict)


class Preference:
    """One verifier's."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self.has_choice = False
        """Whether drafters differ."""
        self._clusters = Clusters()
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._chosen: dict[str, tuple[str, Brought]] = {}

    def set_drafters(self, heads: dict[str, str]) -> None:
        """The assignment changed: each drafter's head."""
        self._heads = dict(sorted(heads.items()))
        self.has_choice = len(set(heads.values())) > 1

    def begin(self, request_id: str, prompt: Sequence[int], adapter: str) -> str | None:
        """Chooses for a new request; None where there is nothing to choose."""
        if not self.has_choice or request_id in self._chosen or not prompt:
            return self.of(request_id)
        key = adapter, self._clusters.of(prompt)
        kind = self._kinds.setdefault(key, Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        head = self._choose(kind)
        kind.requests += 1
        brought = kind.brought[head]
        brought.requests += 1
        self._chosen[request_id] = head, brought
        return head

    def of(self, request_id: str) -> str | None:
        """The head chosen for a request."""
        chosen = self._chosen.get(request_id)
        return None if chosen is None else chosen[0]

    def among(self, request_id: str) -> list[str]:
        """The drafters that it may have."""
        return having(self._heads, self.of(request_id))

    def learn(self, request_id: str, tokens: int) -> None:
        """A verification, for which its drafter had been asked, brought so many tokens."""
        chosen = self._chosen.get(request_id)
        if chosen is not None:
            chosen[1].learn(tokens)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._chosen.pop(request_id, None)

    def _choose(self, kind: Kind) -> str:
        known = {head: kind.brought.setdefault(head, Brought()) for head in sorted(set(self._heads.values()))}
        if kind.requests % TRY_ONE_IN == 0 or any(each.verifications < TRIED for each in known.values()):
            return min(known, key=lambda head: known[head].requests)
        return max(known, key=lambda head: known[head].mean)
