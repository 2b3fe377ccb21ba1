"""The drafter's side of the protocol, without sockets: messages in, messages out.  Drafter thread.

`receive` takes one message and answers greetings and nonsense at once; rounds queue up.  `work` takes as many waiting rounds,
of whatever verifiers, as can share a batch, has the proposer extend and draft, and answers each round.

A verifier has two sockets: `features`, which sends rounds, and `drafts`, which gets the answers.  Both greet with the same
verifier and epoch; a round's own epoch is only echoed.  Refusals of rounds go to `drafts` too, where somebody listens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from backend.drafter.intake import Limits, Malformed, features_of
from backend.drafter.proposer import Ask, Proposer
from backend.fleet import DrafterStats
from backend.protocol import (
    PROTOCOL_VERSION,
    Close,
    Draft,
    Drafts,
    Hello,
    Open,
    Refused,
    Role,
    Round,
    Welcome,
    decode_to_drafter,
    encode,
)

Reply = tuple[bytes, bytes]
"""The peer's identity and the message for it."""
Key = tuple[str, int, str]
"""Verifier, its epoch, request."""

_Part = tuple[str, int, int | None]
"""A request, its base length, and its place among the batch's questions; None: an empty draft."""

MAX_BATCH_ROUNDS = 64
HELLO_FIRST = "hello first"
"""The reason of a refusal that a greeting, and opening all requests again, will cure."""


@dataclass
class _Session:
    """One verifier in one epoch."""

    verifier_id: str
    epoch: int
    features: bytes | None = None
    drafts: bytes | None = None
    last_heard: float = 0.0


@dataclass(frozen=True)
class _Waiting:
    """A round whose turn has not come."""

    session: _Session
    message: Round
    features: Tensor | None
    arrived: float

    def key(self, request_id: str) -> Key:
        return self.session.verifier_id, self.session.epoch, request_id


class DrafterService:
    """Protocol, sequences' life and counters of one drafter, over any `Proposer`."""

    def __init__(
        self, drafter_id: str, proposer: Proposer, idle_ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._drafter_id = drafter_id
        self._proposer = proposer
        self._idle_ttl_s = idle_ttl_s
        self._clock = clock
        self._limits = Limits(proposer.hidden, proposer.vocab_size)
        self._sessions: dict[str, _Session] = {}
        self._peers: dict[bytes, tuple[_Session, Role]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._counters = DrafterStats(drafter_id, 0.0)

    @property
    def has_work(self) -> bool:
        """Whether rounds wait."""
        return bool(self._waiting)

    def handle(self, identity: bytes, frames: Sequence[bytes]) -> list[Reply]:
        """One message, and all that is to be done about it."""
        replies = self.receive(identity, frames)
        while self._waiting:
            replies += self.work()
        return replies

    def receive(self, identity: bytes, frames: Sequence[bytes]) -> list[Reply]:
        """Takes one message; a round waits for `work`."""
        now = self._clock()
        try:
            if not frames:
                raise Malformed("an empty message")
            message = decode_to_drafter(frames[0])
            if isinstance(message, Hello):
                return [self._greet(identity, message, now)]
            session = self._session_of(identity)
            session.last_heard = now
            features = features_of(message, frames[1:], self._limits)
        except (msgspec.MsgspecError, RecursionError):
            return self._refuse(identity, "not a message of this protocol")
        except Malformed as error:
            return self._refuse(identity, str(error))
        self._waiting.append(_Waiting(session, message, features, now))
        return []

    def work(self) -> list[Reply]:
        """One batch: the rounds that waited longest, up to the first that needs another's outcome."""
        started = self._clock()
        rounds: list[_Waiting] = []
        asks: list[Ask] = []
        answers: list[list[_Part]] = []
        asked: set[Key] = set()
        while self._waiting and len(rounds) < MAX_BATCH_ROUNDS:
            waiting = self._waiting[0]
            keys = {waiting.key(item.request_id) for item in waiting.message.items}
            if keys & asked:
                break
            self._waiting.popleft()
            rounds.append(waiting)
            answers.append(self._apply(waiting, asks, started))
            asked |= keys
        drafts = self._proposer.draft(asks) if asks else []
        finished = self._clock()
        self._count(rounds, asks, drafts, finished - started)
        return self._answer(rounds, answers, drafts, started, finished)

    def sweep(self) -> None:
        """Forgets requests unheard of for the configured time."""
        self._proposer.close_idle(self._clock() - self._idle_ttl_s)

    def stats(self, started_at: float) -> DrafterStats:
        """A copy of the counters, with the present load; `started_at` is the process's, Unix seconds."""
        usage = self._proposer.usage()
        heard_after = self._clock() - self._idle_ttl_s
        return msgspec.structs.replace(
            self._counters,
            started_at=started_at,
            sequences=usage.sequences,
            cache_usage=usage.cache_usage,
            prefix_rows_reused=usage.prefix_rows_reused,
            evictions=usage.evictions,
            verifiers=sorted(s.verifier_id for s in self._sessions.values() if s.last_heard >= heard_after),
        )

    def _greet(self, identity: bytes, hello: Hello, now: float) -> Reply:
        if hello.version != PROTOCOL_VERSION:
            raise Malformed(f"protocol version {hello.version}; this drafter speaks {PROTOCOL_VERSION}")
        session = self._sessions.get(hello.verifier_id)
        if session is None or session.epoch != hello.epoch:
            if session is not None:
                self._end(session)
            session = _Session(hello.verifier_id, hello.epoch)
            self._sessions[hello.verifier_id] = session
        # The same socket may greet for another role or verifier; what it said last holds.
        self._peers[identity] = session, hello.role
        if hello.role == "features":
            session.features = identity
        else:
            session.drafts = identity
        session.last_heard = now
        return identity, encode(Welcome(PROTOCOL_VERSION, self._drafter_id, self._proposer.kind))

    def _end(self, session: _Session) -> None:
        """A new epoch has begun: the old one's requests are over, its sockets strangers, its rounds unwanted."""
        for identity in [i for i, (owner, _) in self._peers.items() if owner is session]:
            del self._peers[identity]
        self._waiting = deque(w for w in self._waiting if w.session is not session)
        for key in self._proposer.requests():
            if isinstance(key, tuple) and key[:2] == (session.verifier_id, session.epoch):
                self._proposer.close(key)

    def _session_of(self, identity: bytes) -> _Session:
        session, role = self._peers.get(identity, (None, "drafts"))
        if session is None:
            raise Malformed(HELLO_FIRST)
        if role != "features":
            raise Malformed("rounds come from the features socket")
        return session

    def _refuse(self, identity: bytes, reason: str) -> list[Reply]:
        self._counters.rejected += 1
        session, role = self._peers.get(identity, (None, "drafts"))
        listener = session.drafts if session is not None and role == "features" else None
        return [(listener or identity, encode(Refused(reason)))]

    def _apply(self, waiting: _Waiting, asks: list[Ask], now: float) -> list[_Part]:
        """Takes a round's news and adds its questions to `asks`; returns what to answer."""
        answers: list[_Part] = []
        proposer, at = self._proposer, 0
        for item in waiting.message.items:
            key = waiting.key(item.request_id)
            if isinstance(item, Close):
                proposer.close(key)
                continue
            features = None if waiting.features is None else waiting.features[at : at + item.rows]
            at += item.rows
            if item.base_len > proposer.max_position:
                known = False
            elif isinstance(item, Open):
                proposer.open(key, list(item.tokens), item.rows, now)
                known = True
            else:
                known = proposer.commit(key, item.base_len, item.tokens, item.rows, now)
            if not known:
                answers.append((item.request_id, item.base_len, None))
                continue
            if item.k:
                answers.append((item.request_id, item.base_len, len(asks)))
            asks.append(Ask(key, item.base_len, item.rows, item.k, features))
        return answers

    def _answer(
        self,
        rounds: list[_Waiting],
        answers: list[list[_Part]],
        drafts: list[list[int]],
        started: float,
        finished: float,
    ) -> list[Reply]:
        replies: list[Reply] = []
        draft_us = round((finished - started) * 1e6)
        for waiting, parts in zip(rounds, answers, strict=True):
            if waiting.session.drafts is None:
                continue
            items = [
                Draft(request_id, base_len, [] if index is None else drafts[index]) for request_id, base_len, index in parts
            ]
            queue_us = round((started - waiting.arrived) * 1e6)
            message = waiting.message
            replies.append((waiting.session.drafts, encode(Drafts(message.epoch, message.seq, draft_us, queue_us, items))))
        return replies

    def _count(self, rounds: list[_Waiting], asks: list[Ask], drafts: list[list[int]], spent_s: float) -> None:
        counters = self._counters
        counters.rounds += len(rounds)
        counters.rows += sum(ask.rows for ask in asks)
        counters.draft_tokens += sum(len(tokens) for tokens in drafts)
        counters.busy_s += spent_s
