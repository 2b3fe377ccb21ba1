"""Chooses which of several draft models drafts for a request: the one that gained such requests the most tokens.

Pure; the scheduler's process and thread.  Drafters with the same head (`Member.head`) are one choice, and share its requests by
`pairing.py`.  A request keeps its head for life, because another head would have to read all of its text first.  A kind is an
adapter and a cluster of prompts that use the same words.  Heads are compared by tokens per verification while drafters are
asked; a late or missing draft counts as an empty one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.speculation.pairing import having

WINDOW = 512
"""Verifications that a mean covers; older ones decay."""
TRIED = 64
"""Verifications that each head gets of a kind before heads are compared."""
TRY_ONE_IN = 16
"""After that, one in 16 requests of a kind goes to the head that has had the fewest."""
KINDS = 256
"""Most kinds remembered, the latest."""
BUCKETS, READ = 1024, 512
"""A prompt is described by counts of its last 512 token ids modulo 1024."""
ALIKE = 0.6
"""Least cosine between a prompt and the centre of its cluster."""
CLUSTERS = 16
"""Most clusters."""


class Clusters:
    """Groups prompts by the tokens they use."""

    def __init__(self) -> None:
        self._centres: npt.NDArray[np.float64] = np.zeros((0, BUCKETS))

    def of(self, prompt: Sequence[int]) -> int:
        """The number of a prompt's cluster.  Its centre moves a little towards the prompt."""
        counts = np.bincount(np.asarray(prompt[-READ:], dtype=np.int64) % BUCKETS, minlength=BUCKETS)
        # Without the root, line breaks and commas would dominate.
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
    """What one head gained one kind of requests, in recent verifications."""

    requests: int = 0
    verifications: float = 0.0
    tokens: float = 0.0

    def learn(self, tokens: int) -> None:
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
    """Chooses a head for each request of one verifier."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self.has_choice = False
        """Whether the drafters have different heads."""
        self._clusters = Clusters()
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._chosen: dict[str, tuple[str, Brought]] = {}

    def set_drafters(self, heads: dict[str, str]) -> None:
        """The assignment changed.  `heads`: drafter to the name of its head."""
        self._heads = dict(sorted(heads.items()))
        self.has_choice = len(set(heads.values())) > 1

    def begin(self, request_id: str, prompt: Sequence[int], adapter: str) -> str | None:
        """Chooses and returns a new request's head; None if all drafters have the same one."""
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
        """The drafters that may serve a request."""
        return having(self._heads, self.of(request_id))

    def learn(self, request_id: str, tokens: int) -> None:
        """Takes one verification, for which the request's drafter had been asked: it emitted `tokens` tokens."""
        chosen = self._chosen.get(request_id)
        if chosen is not None:
            chosen[1].learn(tokens)

    def forget(self, request_id: str) -> None:
        self._chosen.pop(request_id, None)

    def _choose(self, kind: Kind) -> str:
        known = {head: kind.brought.setdefault(head, Brought()) for head in sorted(set(self._heads.values()))}
        if kind.requests % TRY_ONE_IN == 0 or any(each.verifications < TRIED for each in known.values()):
            return min(known, key=lambda head: known[head].requests)
        return max(known, key=lambda head: known[head].mean)
