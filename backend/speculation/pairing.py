"""Which of a verifier's drafters serves a request.  Pure.

The scheduler decides on a `Pairing` for each new request; it and the worker then get the same drafter from it.  Where drafters
have different heads (`Member.head`), a request goes to the head that has brought its adapter the most tokens per verification
while drafters were asked; a late or missing draft counts as an empty one.  A request keeps its head for life, because another
head would have to read all of its text first.  Drafters with the same head share its requests by a hash.
"""

import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

WINDOW = 512
"""Verifications that a mean covers; older ones decay."""
TRIED = 64
"""Verifications of an adapter that each head gets before heads are compared."""
TRY_ONE_IN = 16
"""After that, one in 16 requests of an adapter goes to the head that has had the fewest."""
SESSIONS = 4096
"""Most sessions remembered, the latest."""
KEPT_FOR = 1.1
"""A session's earlier head counts as so much better, because it has read the session's earlier text."""
TOGETHER = 8
"""Most requests that are paired with one drafter at a time because they begin with the same text."""


class Pairing(NamedTuple):
    """What decides on a request's drafter."""

    key: str
    """Requests with the same key have the same drafter."""
    head: str | None = None
    """The head chosen for the request; None if all drafters have the same one."""

    def drafter(self, heads: Mapping[str, str]) -> str | None:
        """The request's drafter, by rendezvous hashing: when a drafter comes or goes, only its own requests move.

        `heads`: drafter to the name of its head.  None without drafters.
        """
        if len(heads) <= 1:
            return next(iter(heads), None)
        alike = having(heads, self.head)
        return max(alike, key=lambda drafter_id: (zlib.crc32(f"{drafter_id}/{self.key}".encode()), drafter_id))


def key_of(request_id: str, session: str = "") -> str:
    """What a request shares with those that begin with the same text: its session, or the request that it is a sample of.

    The verifier has that text in its prefix cache and does not compute its features again, so no other drafter gets them.
    """
    index, _, request = request_id.partition("_")  # vLLM's names of the samples of an n > 1 request
    return session or (request if request and index.isdecimal() else request_id)


def having(heads: Mapping[str, str], head: str | None) -> list[str]:
    """The drafters that have `head`; all drafters if none has it, or if `head` is None."""
    if head is None:
        return list(heads)
    return [drafter_id for drafter_id, each in heads.items() if each == head] or list(heads)


@dataclass
class HeadScore:
    """What one head gained one adapter's requests, in recent verifications."""

    requests: int = 0
    verifications: float = 0.0
    tokens: float = 0.0

    def learn(self, tokens: int) -> None:
        """Takes one verification, for which a drafter with the head had been asked: it emitted `tokens` tokens."""
        kept = 1 - 1 / WINDOW
        self.verifications = self.verifications * kept + 1
        self.tokens = self.tokens * kept + tokens

    @property
    def mean(self) -> float:
        """Tokens per verification."""
        return self.tokens / self.verifications if self.verifications else 0.0


class Preference:
    """Pairs each request of one verifier with a drafter; the scheduler's process and thread."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self._only: str | None = None
        """The only drafter, or the first one."""
        self.has_choice = False
        """Whether the drafters have different heads."""
        self._scores: dict[str, dict[str, HeadScore]] = {}
        """By adapter and head."""
        self._sessions = OrderedDict[str, str]()
        """The latest head of each session."""
        self._together = Counter[str]()
        """Requests that are paired and not over, by key."""
        # Were it every sixteenth request, trials would always meet the same client where clients take turns.
        self._dice = random.Random(0)

    def set_drafters(self, heads: dict[str, str]) -> None:
        """The assignment changed.  `heads`: drafter to the name of its head."""
        self._heads = dict(sorted(heads.items()))
        self._only = next(iter(self._heads), None)
        self.has_choice = len(set(heads.values())) > 1

    def begin(self, request_id: str, adapter: str, session: str = "") -> tuple[Pairing, HeadScore | None]:
        """Decides on a new request's head and drafter.  `session`: one tenant's session, or empty.

        Also returns the score that learns from the request's verifications, if there was a choice.
        """
        key = key_of(request_id, session)
        if self._together[key] >= TOGETHER:
            # A client that calls everything one session must not keep all other drafters idle.
            key = request_id
        self._together[key] += 1
        if not self.has_choice:
            return Pairing(key), None
        head = self._choose(adapter, session)
        return Pairing(key, head), self._scores[adapter][head]

    def finish(self, pairing: Pairing | None) -> None:
        """A request with this pairing is over."""
        if pairing is None:
            return
        self._together[pairing.key] -= 1
        if not self._together[pairing.key]:
            del self._together[pairing.key]

    def _choose(self, adapter: str, session: str) -> str:
        before = self._scores.get(adapter, {})
        scores = {head: before.get(head) or HeadScore() for head in sorted(set(self._heads.values()))}
        self._scores[adapter] = scores
        if self._dice.random() < 1 / TRY_ONE_IN:
            head = _least_known(scores)
        else:
            head = _best(scores, self._sessions.pop(session, None))
            if session:
                self._sessions[session] = head
                if len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
        scores[head].requests += 1
        return head

    def drafter_of(self, pairing: Pairing | None) -> str | None:
        """The drafter of a request with this pairing; the first one if it has none.  None without drafters."""
        return self._only if pairing is None or len(self._heads) <= 1 else pairing.drafter(self._heads)


def _least_known(scores: dict[str, HeadScore]) -> str:
    return min(scores, key=lambda head: scores[head].requests)


def _best(scores: dict[str, HeadScore], earlier: str | None) -> str:
    """The best head; `earlier`, the session's head, is given up only for one that is better by far."""
    if any(each.verifications < TRIED for each in scores.values()):
        return earlier if earlier in scores else _least_known(scores)
    return max(scores, key=lambda head: scores[head].mean * (KEPT_FOR if head == earlier else 1))
