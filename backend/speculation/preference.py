"""Which of several different draft models drafts for a request: the one that brought requests of its kind the most tokens.

Pure; the scheduler's process and thread.  Drafters with the same head (`Member.head`) are one choice, and share its requests by
`pairing.py`.  A request keeps its head for life, because another one would have to read all of its text first.  A kind is an
adapter, a cluster of prompts that use the same words, and a tenant.  While little is known of a tenant's own kind, all tenants'
decides: so a new tenant costs no trials.  What counts is tokens per verification while drafters are asked: a draft that is late
or stays out counts as none.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.speculation.pairing import having

WINDOW = 512
"""Verifications that a mean remembers."""
TRIED = 64
"""Verifications of a kind that each head gets before it is judged."""
TRY_ONE_IN = 16
"""After that, of so many requests of a kind one goes to the head that is known least."""
KINDS, SESSIONS = 1024, 4096
"""Remembered."""
KEPT_FOR = 1.1
"""A session keeps its head unless another brings more by this factor: the head has read the session's earlier text."""
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


Kind = dict[str, Brought]
"""What each head has brought one kind of requests."""


class Preference:
    """One verifier's."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self.has_choice = False
        """Whether drafters differ."""
        self._clusters = Clusters()
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._sessions = OrderedDict[Hashable, str]()
        self._chosen: dict[str, tuple[str, list[Brought]]] = {}
        # Trials by turns would always meet the same tenant where tenants take turns, too.
        self._dice = random.Random(0)

    def set_drafters(self, heads: dict[str, str]) -> None:
        """The assignment changed: each drafter's head."""
        self._heads = dict(sorted(heads.items()))
        self.has_choice = len(set(heads.values())) > 1

    def begin(self, request_id: str, prompt: Sequence[int], adapter: str, tenant: str = "", session: str = "") -> str | None:
        """Chooses for a new request; None where there is nothing to choose.  Empty: no such label is known."""
        if not self.has_choice or request_id in self._chosen or not prompt:
            return self.of(request_id)
        cluster = self._clusters.of(prompt)
        # All tenants' kind, then its own.
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
        self._chosen[request_id] = head, [each[head] for each in kinds]
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
            for brought in chosen[1]:
                brought.learn(tokens)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._chosen.pop(request_id, None)

    def _kind(self, *key: Hashable) -> Kind:
        """What is known of it, for the heads that there are."""
        before = self._kinds.pop(key, {})
        self._kinds[key] = kind = {head: before.get(head) or Brought() for head in sorted(set(self._heads.values()))}
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        return kind


def _is_known(kind: Kind) -> bool:
    return all(each.verifications >= TRIED for each in kind.values())


def _least_known(kind: Kind) -> str:
    return min(kind, key=lambda head: kind[head].requests)


def _best(kind: Kind, earlier: str | None) -> str:
    """The session's `earlier` head, unless another is better by far."""
    if not _is_known(kind):
        return earlier if earlier in kind else _least_known(kind)
    return max(kind, key=lambda head: kind[head].mean * (KEPT_FOR if head == earlier else 1))
