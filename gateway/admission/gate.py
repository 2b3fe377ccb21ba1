"""Lets requests wait until verifiers have room: the queue's clock, timer and futures.  The gateway's event loop.

While there is room and no request waits, `enter` returns without suspending.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.admission.claim import Claim
from gateway.admission.queue import FairQueue, Item
from gateway.errors import Overloaded, Unavailable

MAX_RETRY_AFTER_S = 60
"""Bound of `Retry-After`: later load cannot be predicted."""
UNKNOWN_TOKENS = 256
"""Tokens assumed for a claim without an estimate."""
MAX_QUEUED_TOKENS = 1 << 20
"""Most tokens of waiting sequences, prompts and expected outputs together."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A claim in the queue, and the futures that wait for it: one per prompt of the request."""

    item: Item
    claim: Claim
    since: float
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(frozen=True)
class Queueing:
    max_sequences: int = 1024
    wait_s: float = 60.0
    """A request that waits longer, or is expected to, is turned away."""


class Gate:
    """Admits claims while there is room, else queues them.  `room()` is how many more sequences verifiers can take now.

    An admitted claim has room reserved.  `placed` uses it up for one sequence; `abandon` frees the rest.
    """

    def __init__(self, room: Callable[[], float], queueing: Queueing) -> None:
        self._room = room
        self._queue = FairQueue(queueing.max_sequences, MAX_QUEUED_TOKENS)
        self.wait_s = queueing.wait_s
        self._waiting: dict[Item, _Waiting] = {}
        self._by_claim: dict[Claim, _Waiting] = {}
        self._promised = 0
        self._timer: asyncio.TimerHandle | None = None
        self.shed = 0
        """Requests turned away."""

    @property
    def sequences(self) -> int:
        """Sequences that wait."""
        return self._queue.sequences

    @property
    def tokens(self) -> int:
        """Tokens of waiting requests, expected outputs included."""
        return self._queue.tokens

    def limit(self, queueing: Queueing) -> None:
        """Sets new bounds, from the next request on."""
        self._queue.max_sequences, self.wait_s = queueing.max_sequences, queueing.wait_s

    async def enter(self, claim: Claim) -> None:
        """Waits until the claim's sequences may go to the verifiers.  Raises `Overloaded`."""
        if claim.granted:
            return
        if claim.retry_after_s is not None:
            raise Overloaded.after(claim.retry_after_s)
        waiting = self._by_claim.get(claim)
        if waiting is None:
            if not self._queue and self._room() - self._promised >= 1:
                self._queue.bypass(_item(claim, math.inf))
                self._grant(claim)
                return
            waiting = self._queue_up(claim)
        await self._wait(waiting)

    def placed(self, claim: Claim) -> None:
        if claim.promised:
            claim.promised -= 1
            self._promised -= 1

    def abandon(self, claim: Claim) -> None:
        """Frees room reserved for the claim, because no more of its sequences will come."""
        if claim.promised:
            self._promised -= claim.promised
            claim.promised = 0
            self.look()

    def settle(self, claim: Claim) -> None:
        """Corrects the charge of a claim whose sequences have all ended from the estimate to the true number of tokens."""
        expected, claim.expected_tokens = claim.expected_tokens, claim.tokens
        caller = claim.caller
        if claim.tokens != expected:
            self._queue.settle(caller.name, caller.weight, claim.priority, claim.tokens - expected)

    def look(self) -> None:
        """Turns away late requests, and admits others while there is room."""
        if not self._queue:
            return
        now = time.monotonic()
        for item in self._queue.expire(now):
            self._refuse(self._waiting[item], now)
        while self._queue and self._room() - self._promised >= 1:
            following = self._queue.pop(now)
            if following is not None:
                self._admit(self._waiting[following], now)
        self._set_timer()

    def fail_all(self, error: type[Unavailable]) -> None:
        for waiting in list(self._waiting.values()):
            self._fail(waiting, error())
        self._set_timer()

    # Details

    def _queue_up(self, claim: Claim) -> _Waiting:
        now = time.monotonic()
        wait_s = self.wait_s if claim.wait_s is not None and claim.wait_s < 0 else claim.wait_s
        item = _item(claim, math.inf if wait_s is None else now + wait_s)
        expected_s = self._queue.expected_wait_s(item.flow, item.priority, now)
        if wait_s is not None and (wait_s <= 0 or (expected_s is not None and expected_s > wait_s)):
            raise self._turn_away(claim, _retry_after(expected_s, wait_s))
        waiting = _Waiting(item, claim, now)
        self._waiting[item] = self._by_claim[claim] = waiting
        for victim in self._queue.push(item):
            self._refuse(self._waiting[victim], now)
        self._set_timer()
        if claim.retry_after_s is not None:
            raise Overloaded.after(claim.retry_after_s)
        return waiting

    async def _wait(self, waiting: _Waiting) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.waiters.append(future)
        try:
            await future
        except asyncio.CancelledError:
            waiting.waiters.remove(future)
            if not waiting.waiters and waiting.item in self._waiting:
                self._drop(waiting)
                self._set_timer()
            raise

    def _admit(self, waiting: _Waiting, now: float) -> None:
        self._drop(waiting)
        waiting.claim.queued_s += now - waiting.since
        self._grant(waiting.claim)
        for future in waiting.waiters:
            if not future.done():
                future.set_result(None)

    def _grant(self, claim: Claim) -> None:
        claim.granted = True
        claim.promised = claim.sequences
        self._promised += claim.sequences

    def _refuse(self, waiting: _Waiting, now: float) -> None:
        item = waiting.item
        seconds = _retry_after(self._queue.expected_wait_s(item.flow, item.priority, now), 0.0)
        self._fail(waiting, self._turn_away(waiting.claim, seconds))

    def _turn_away(self, claim: Claim, seconds: int) -> Overloaded:
        self.shed += 1
        claim.retry_after_s = seconds
        return Overloaded.after(seconds)

    def _fail(self, waiting: _Waiting, error: Exception) -> None:
        self._drop(waiting)
        for future in waiting.waiters:
            if not future.done():
                future.set_exception(error)

    def _drop(self, waiting: _Waiting) -> None:
        self._queue.remove(waiting.item)
        self._waiting.pop(waiting.item, None)
        self._by_claim.pop(waiting.claim, None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._queue.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self.look)


def _item(claim: Claim, deadline: float) -> Item:
    caller = claim.caller
    tokens = claim.expected_tokens or UNKNOWN_TOKENS
    return Item(caller.name, caller.weight, claim.priority, claim.sequences, tokens, deadline)


def _retry_after(expected_s: float | None, wait_s: float) -> int:
    """Seconds after which a request would probably be served within `wait_s`."""
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil((expected_s or 0.0) - wait_s)))
