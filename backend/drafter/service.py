"""The drafter's side of the protocol, without sockets: messages in, messages out.  Drafter thread.

`receive` takes one message.  It answers greetings and malformed messages at once; rounds queue up.  `work` makes one batch of
as many waiting rounds as can share it, from all verifiers, and adds the fresh drafts that are due.  Then the proposer extends
its cache and drafts.  Outcomes are enumerated only when neither rounds nor fresh drafts wait (`nexts.py`).

A verifier has two sockets: `features`, which sends rounds, and `drafts`, which sends `Next` and gets all answers.  Both greet
with the same verifier and epoch.  Refusals of rounds go to `drafts`, too, unless the verifier has to greet again.  `Unknown`,
which names requests to be opened again, goes to `features`, whose owner opens them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from backend.drafter.following import Following
from backend.drafter.lessons import Lessons
from backend.drafter.nexts import Key, Nexts, Wanted
from backend.drafter.proposer import NOTHING, Drafted, DraftRequest, Premise, Proposer, Sampling
from backend.drafter.sessions import Malformed, Session, Waiting, check_next, features_of
from backend.drafter.spans import DraftSpans
from backend.fleet import DrafterStats
from backend.fleet.speed import Line
from backend.wire import drafting as wire

Reply = tuple[bytes, bytes]
"""The peer's identity and the message for it."""

MAX_BATCH_ROUNDS = 64
MAX_BATCH_OUTCOMES = 2048
"""A larger batch would make requests wait longer for fresh drafts."""


class DrafterService:
    """One drafter's protocol, life of sequences, and counters, over any `Proposer`."""

    def __init__(
        self,
        drafter_id: str,
        proposer: Proposer,
        idle_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        spans: DraftSpans | None = None,
        lessons: Lessons | None = None,
        following: Following | None = None,
    ) -> None:
        self._following = following or Following(frozenset, lambda newer: None)
        self._spans = spans or DraftSpans(None, drafter_id)
        self._lessons = lessons
        self._exchanges = 0
        self.proposer = proposer
        self._idle_ttl_s = idle_ttl_s
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._peers: dict[bytes, Session] = {}
        """By the identity of each of its sockets."""
        self._waiting: deque[Waiting] = deque()
        self._nexts = Nexts()
        self._heard: dict[Key, float] = {}
        """When a message last named each request."""
        self._epochs_before: dict[str, int] = {}
        """Verifier's epoch at our last head swap.  Until it greets with another, it projects for the old head."""
        self._weights: dict[str, int] = {}
        """How often each verifier has exchanged its weights, if at all."""
        self._counters = DrafterStats(drafter_id, time.time())
        self._line = Line()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._nexts.is_due

    def receive(self, identity: bytes, frames: Sequence[bytes]) -> list[Reply]:
        """Takes one message.  Rounds and drafts it asks for wait for `work`."""
        now = self._clock()
        try:
            message = wire.decode_to_drafter(frames[0])
            if isinstance(message, wire.Hello):
                return self._greet(identity, message, now)
            session = self._peers.get(identity)
            if session is None:
                raise Malformed(wire.HELLO_FIRST)
            session.last_heard = now
            if isinstance(message, wire.Part):
                return self._wish(identity, self._following.receive(session, message, frames[1:], now))
            following = message.next if isinstance(message, wire.Round) else message
            if following is not None:
                check_next(following, self.proposer)
            if isinstance(message, wire.Round):
                features = features_of(message, frames[1:], self.proposer, session.ring)
                self._waiting.append(Waiting(session, message, features, now))
        except msgspec.DecodeError:
            return self._refuse(identity, "not a message of this protocol")
        except Malformed as error:
            return self._refuse(identity, str(error))
        if following is None:
            return []
        self._take_next(session, following, now)
        return self._wish(session.drafts, self._following.ask(session, now))

    def work(self) -> list[Reply]:
        """Computes one batch: rounds and fresh drafts if any wait, else outcomes."""
        started = self._clock()
        asks: list[DraftRequest] = []
        lost: dict[bytes, list[str]] = {}
        rounds = self._take_rounds(asks, lost)
        fresh = self._join_fresh(asks)
        if not rounds and not fresh:
            return self._imagine(started)
        drafts = self.proposer.draft(asks) if asks else []
        finished = self._clock()
        self._count(asks, drafts, finished - started)
        for ask, drafted in zip(asks, drafts, strict=True):
            self._spans.drafted(ask.key, len(drafted.tokens), finished - started)
        unknown = [(listener, wire.encode(wire.Unknown(requests))) for listener, requests in lost.items()]
        return self._answer(fresh, drafts, started, finished) + unknown

    def replace(self, proposer: Proposer, retargeted: bool = False) -> list[Reply]:
        """Drafts with another proposer from now on.  Verifiers have to greet again and open their requests again.

        `retargeted`: it is the present head, with new tensors of the target.  Returns what tells the verifiers' sockets.
        """
        # The `drafts` socket would not learn of it otherwise while all questions come with rounds.
        refusals = [(identity, wire.encode(wire.Refused(wire.HELLO_FIRST))) for identity in self._peers]
        for session in self._sessions.values():
            self._end(session)
            if self._lessons is None and not retargeted:
                self._epochs_before[session.verifier_id] = session.epoch
        self._sessions.clear()
        self._following.reset()
        self._exchanges += 1
        if self._lessons is not None and retargeted:
            self._lessons.watch.retargeted()
        elif self._lessons is not None:
            self._lessons.watch.exchanged()
        self.proposer = proposer
        return refusals

    def sweep(self) -> None:
        """Forgets requests without a message for the configured time."""
        before = self._clock() - self._idle_ttl_s
        for key in [key for key, heard in self._heard.items() if heard < before]:
            self._forget(key, "idle")
        for session in self._sessions.values():
            if session.last_heard < before:
                session.close_ring()

    def stats(self) -> DrafterStats:
        """A copy of the counters, with the present load."""
        usage = self.proposer.usage()
        heard_after = self._clock() - self._idle_ttl_s
        return msgspec.structs.replace(
            self._counters,
            sequences=usage.sequences,
            cache_usage=usage.cache_usage,
            evictions=usage.evictions,
            speed=self._line.read(),
            verifiers=sorted(s.verifier_id for s in self._sessions.values() if s.last_heard >= heard_after),
        )

    def _greet(self, identity: bytes, hello: wire.Hello, now: float) -> list[Reply]:
        if hello.version != wire.PROTOCOL_VERSION:
            raise Malformed(f"protocol version {hello.version}; this drafter speaks {wire.PROTOCOL_VERSION}")
        if hello.weights != self._weights.get(hello.verifier_id, 0):
            self._weights[hello.verifier_id] = hello.weights
            self.proposer.invalidate()
            if self._lessons is not None:
                self._lessons.watch.retargeted()
        session = self._sessions.get(hello.verifier_id)
        if session is None or session.epoch != hello.epoch:
            if session is not None:
                self._end(session)
            if self._epochs_before.get(hello.verifier_id, hello.epoch) != hello.epoch:
                # Until now the verifier projected features for the head before: those rows fit the new head no better.
                del self._epochs_before[hello.verifier_id]
                self.proposer.invalidate()
            session = Session(hello.verifier_id, hello.epoch)
            self._sessions[hello.verifier_id] = session
        # A socket may greet again for another role or verifier, or come back on a new connection; the last greeting counts.
        self._peers.pop((session.features if hello.role == "features" else session.drafts) or b"", None)
        self._peers[identity] = session
        if hello.role == "features":
            session.features = identity
            session.map_ring(hello.ring)
        else:
            session.drafts = identity
        session.last_heard = now
        ring = hello.role == "features" and session.ring is not None
        wish = self._following.greeted(session, hello, now) if hello.role == "drafts" else None
        return [(identity, wire.encode(wire.Welcome(ring, self._exchanges))), *self._wish(identity, wish)]

    @staticmethod
    def _wish(identity: bytes | None, wish: wire.Want | None) -> list[Reply]:
        return [] if wish is None or identity is None else [(identity, wire.encode(wish))]

    def _end(self, session: Session) -> None:
        """Ends the session of an old epoch: forgets its requests, sockets and waiting rounds."""
        session.close_ring()
        self._peers = {identity: owner for identity, owner in self._peers.items() if owner is not session}
        self._waiting = deque(w for w in self._waiting if w.session is not session)
        for key in [key for key in self._heard if key[:2] == (session.verifier_id, session.epoch)]:
            self._forget(key, "epoch")

    def _forget(self, key: Key, reason: str) -> None:
        """Ends a request.  Its cache rows stay for reuse."""
        self._heard.pop(key, None)
        self.proposer.close(key)
        self._nexts.forget(key)
        self._spans.closed(key, reason)
        if self._lessons is not None:
            self._lessons.forget(key)

    def _refuse(self, identity: bytes, reason: str) -> list[Reply]:
        self._counters.rejected += 1
        session = self._peers.get(identity)
        # A socket that has to greet again must get the refusal itself.
        if session is not None and session.drafts is not None and reason != wire.HELLO_FIRST:
            identity = session.drafts
        return [(identity, wire.encode(wire.Refused(reason)))]

    def _take_next(self, session: Session, message: wire.Next, now: float) -> None:
        for item in message.items:
            key = session.verifier_id, session.epoch, item.request_id
            self._heard[key] = now
            self._nexts.want(Wanted(key, item, now, message.chance_weights), self.proposer.length(key))

    def _take_rounds(self, asks: list[DraftRequest], lost: dict[bytes, list[str]]) -> list[Waiting]:
        """Takes the rounds that waited longest, up to the first that repeats a request of the batch; see `_apply`."""
        rounds: list[Waiting] = []
        taken: set[Key] = set()
        while self._waiting and len(rounds) < MAX_BATCH_ROUNDS:
            waiting = self._waiting[0]
            keys = {waiting.key(item.request_id) for item in waiting.message.items}
            if keys & taken:
                break
            self._waiting.popleft()
            rounds.append(waiting)
            self._apply(waiting, asks, lost)
            taken |= keys
        return rounds

    def _join_fresh(self, asks: list[DraftRequest]) -> list[tuple[Wanted, int | None]]:
        """Adds the fresh drafts that are due to `asks`.  Returns each with its index there; None: its answer is empty."""
        places = {ask.key: index for index, ask in enumerate(asks)}
        fresh: list[tuple[Wanted, int | None]] = []
        for wanted in self._nexts.take_fresh():
            item, place = wanted.item, places.get(wanted.key)
            if place is not None and asks[place].base_len == item.base_len:
                # The round that made the request so long is in the same batch.
                asks[place] = replace(asks[place], until=wanted.until)
            elif place is not None:
                place = None
            elif self.proposer.length(wanted.key) == item.base_len:
                place = len(asks)
                asks.append(DraftRequest(wanted.key, item.base_len, 0, None, wanted.until))
            fresh.append((wanted, place))
        return fresh

    def _imagine(self, started: float) -> list[Reply]:
        """Drafts ahead: enumerates outcomes of verifications that are running."""
        batch = self._nexts.take_outcomes(MAX_BATCH_OUTCOMES)
        premises = [Premise(w.key, w.item.base_len, w.until, w.item.verifying, w.item.outcomes) for w in batch]
        found = self.proposer.draft_outcomes(premises)
        spent_s = self._clock() - started
        self._counters.busy_s += spent_s
        blocks = defaultdict[bytes | None, list[wire.Block]](list)
        for wanted, outcomes in zip(batch, found, strict=True):
            self._spans.imagined(wanted.key, len(outcomes), spent_s)
            if self._lessons is not None:
                self._lessons.imagined(wanted.key, wanted.item.base_len, wanted.item.verifying, outcomes)
            block = wire.Block(wanted.item.request_id, wanted.item.base_len, wanted.item.verifying, outcomes)
            blocks[self._listener(wanted)].append(block)
        draft_us = round(spent_s * 1e6)
        return [(peer, wire.encode(wire.Ahead(draft_us, items))) for peer, items in blocks.items() if peer is not None]

    def _listener(self, wanted: Wanted) -> bytes | None:
        """The peer that waits for this: its drafts socket; None if it has none."""
        session = self._sessions.get(wanted.key[0])
        return None if session is None else session.drafts

    def _apply(self, waiting: Waiting, asks: list[DraftRequest], lost: dict[bytes, list[str]]) -> None:
        """Takes a round's tokens.  Adds to `asks` the rows to compute, and to `lost` the requests that must be opened again.

        `lost` is by features socket.
        """
        proposer, at = self.proposer, 0
        for item in waiting.message.items:
            key = waiting.key(item.request_id)
            if isinstance(item, wire.Close):
                if self._lessons is not None:
                    self._lessons.closed(key)
                self._forget(key, item.reason)
                continue
            self._heard[key] = waiting.arrived
            features = None if waiting.features is None else waiting.features[at : at + item.rows]
            at += item.rows
            if item.base_len > proposer.max_position:
                known = False
            elif isinstance(item, wire.Open):
                known = True
                restrictions = item.top_k, item.top_p, item.min_p
                sampling = Sampling.of(item.seed, item.temperature, item.independent, *restrictions)
                proposer.open(key, list(item.tokens), item.rows, sampling)
                self._spans.opened(key, item.trace)
                if self._lessons is not None:
                    self._lessons.opened(key, item, features)
            else:
                known = proposer.commit(key, item.base_len, item.tokens, item.rows)
                if not known and waiting.session.features is not None:
                    lost.setdefault(waiting.session.features, []).append(item.request_id)
                elif self._lessons is not None:
                    self._lessons.committed(key, item, features)
            if not known:
                self._nexts.reached(key, item.base_len, waiting.arrived, known=False)
                continue
            # Not always `item.base_len`: a round computed anew after a preemption takes no tokens back.
            self._nexts.reached(key, proposer.length(key) or 0, waiting.arrived)
            asks.append(DraftRequest(key, item.base_len, item.rows, features))

    def _answer(
        self, fresh: list[tuple[Wanted, int | None]], drafts: list[Drafted], started: float, finished: float
    ) -> list[Reply]:
        items = defaultdict[bytes | None, list[wire.Draft]](list)
        since: dict[bytes | None, float] = {}
        for wanted, place in fresh:
            drafted = NOTHING if place is None else drafts[place]
            item, peer = wanted.item, self._listener(wanted)
            draft = wire.Draft(item.request_id, item.base_len, drafted.tokens, drafted.signs, drafted.proposal)
            items[peer].append(draft)
            since[peer] = min(since.get(peer, started), wanted.since)
            self._nexts.drafted(wanted, drafted.tokens, finished)
            if self._lessons is not None:
                self._lessons.drafted(wanted.key, item.base_len, drafted.first)
        draft_us = round((finished - started) * 1e6)
        return [
            (peer, wire.encode(wire.Drafts(draft_us, round((started - since[peer]) * 1e6), own)))
            for peer, own in items.items()
            if peer is not None
        ]

    def _count(self, asks: list[DraftRequest], drafts: list[Drafted], spent_s: float) -> None:
        counters = self._counters
        drafted = sum(1 for ask in asks if ask.until.k)
        if drafted:
            counters.batches += 1
            counters.drafts += drafted
            counters.draft_s += spent_s
            self._line.note(drafted, spent_s)
        counters.draft_tokens += sum(len(drafted.tokens) for drafted in drafts)
        counters.busy_s += spent_s
