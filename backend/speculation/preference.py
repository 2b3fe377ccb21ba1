"""Chooses which of several draft models drafts for a request: the one that gained such requests the most tokens.

Pure; the scheduler's process and thread.  Drafters with the same head (`Member.head`) are one choice, and share its requests by
`pairing.py`.  A request keeps its head for life, because another head would have to read all of its text first.  A kind is an
adapter, a cluster of prompts that use the same words, and a tenant.  A new tenant costs no trials: all tenants' requests decide
until its own are enough.  Heads are compared by tokens per verification while drafters are asked; a late or missing draft
counts as an empty one.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.speculation.pairing import Pairing, Pairings, key_of

WINDOW = 512
"""Verifications that a mean covers; older ones decay."""
TRIED = 64
"""Verifications that each head gets of a kind before heads are compared."""
TRY_ONE_IN = 16
"""After that, one in 16 requests of a kind goes to the head that has had the fewest."""
KINDS, SESSIONS = 1024, 4096
"""Most kinds and sessions remembered, the latest."""
TOGETHER = 8
"""Most requests that are paired with one drafter at a time because they begin with the same text."""
KEPT_FOR = 1.1
"""A session's earlier head counts as so much better, because it has read the session's earlier text."""
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
class HeadScore:
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


Kind = dict[str, HeadScore]
"""What each head has brought one kind of requests."""


class Preference:
    """Chooses a head for each request of one verifier."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self.has_choice = False
        """Whether the drafters have different heads."""
        self._clusters = Clusters()
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._sessions = OrderedDict[Hashable, str]()
        self._chosen: dict[str, list[HeadScore]] = {}
        """By request, if there was a choice."""
        self._pairings = Pairings()
        # With every sixteenth request, trials would always meet the same tenant where tenants take turns.
        self._dice = random.Random(0)

    def set_drafters(self, heads: dict[str, str]) -> None:
        """The assignment changed.  `heads`: drafter to the name of its head."""
        self._heads = dict(sorted(heads.items()))
        self.has_choice = len(set(heads.values())) > 1

    def begin(self, request_id: str, prompt: Sequence[int], adapter: str, tenant: str = "", session: str = "") -> Pairing:
        """Decides on a new request's head and drafter.  `tenant`, `session`: as in `RequestOptions`."""
        if request_id not in self._pairings:
            key = key_of(request_id, session and f"{tenant}/{session}")
            if sum(each.key == key for each in self._pairings.values()) >= TOGETHER:
                # A client that calls everything one session must not keep all other drafters idle.
                key = request_id
            head = self._choose(request_id, prompt, adapter, tenant, session) if self.has_choice and prompt else None
            self._pairings[request_id] = Pairing(key, head)
        return self._pairings[request_id]

    def _choose(self, request_id: str, prompt: Sequence[int], adapter: str, tenant: str, session: str) -> str:
        cluster = self._clusters.of(prompt)
        # The kind of all tenants' requests, then the tenant's own.
        kinds = [self._kind(adapter, cluster, each) for each in dict.fromkeys(("", tenant))]
        kind = kinds[-1] if _is_known(kinds[-1]) else kinds[0]
        if self._dice.random() < 1 / TRY_ONE_IN:
            head = _least_known(kind)
        else:
            head = _best(kind, self._sessions.get((tenant, session)) if session else None)
            if session:
                self._sessions[tenant, session] = head
                self._sessions.move_to_end((tenant, session))
                if len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
        for each in kinds:
            each[head].requests += 1
        self._chosen[request_id] = [each[head] for each in kinds]
        return head

    def drafter_of(self, request_id: str) -> str | None:
        """The drafter of a request; None without drafters."""
        return self._pairings[request_id].drafter(self._heads)

    def learn(self, request_id: str, tokens: int) -> None:
        """Takes one verification, for which the request's drafter had been asked: it emitted `tokens` tokens."""
        for brought in self._chosen.get(request_id, ()):
            brought.learn(tokens)

    def forget(self, request_id: str) -> None:
        self._chosen.pop(request_id, None)
        self._pairings.pop(request_id, None)

    def _kind(self, *key: Hashable) -> Kind:
        """What is known of a kind, for the present heads."""
        before = self._kinds.pop(key, {})
        self._kinds[key] = kind = {head: before.get(head) or HeadScore() for head in sorted(set(self._heads.values()))}
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        return kind


def _is_known(kind: Kind) -> bool:
    return all(each.verifications >= TRIED for each in kind.values())


def _least_known(kind: Kind) -> str:
    return min(kind, key=lambda head: kind[head].requests)


def _best(kind: Kind, earlier: str | None) -> str:
    """The best head; `earlier`, the session's head, is given up only for one that is better by far."""
    if not _is_known(kind):
        return earlier if earlier in kind else _least_known(kind)
    return max(kind, key=lambda head: kind[head].mean * (KEPT_FOR if head == earlier else 1))
