"""Lets requests wait until verifiers have room: the queue's clock, timers and futures.  The gateway's event loop.

While there is room and no request waits, `enter` returns without suspending.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.admission.claim import Claim
from gateway.admission.queue import FairQueue, Item
from gateway.http.errors import Overloaded, Unavailable

MAX_RETRY_AFTER_S = 60
"""Bound of `Retry-After`: later load cannot be predicted."""
UNKNOWN_TOKENS = 256
"""Tokens assumed for a claim without an estimate."""
QUEUED_TOKENS = 1 << 16
"""Most tokens of waiting sequences, prompts and expected outputs together, for each sequence that may wait."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting(Item):
    """A claim in the queue."""

    claim: Claim
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    timer: asyncio.TimerHandle | None = None
    """Turns it away; None: it waits without limit."""


class Gate:
    """Admits claims while there is room, else queues them.  `room()` is how many more sequences verifiers can take now.

    At most `max_sequences` wait.  A request that waits longer than `wait_s`, or is expected to, is turned away.
    An admitted claim has room reserved.  `placed` uses it up for one sequence; `free_reserved` frees the rest.
    """

    def __init__(
        self, room: Callable[[], float], max_sequences: int, wait_s: float, is_paused: Callable[[], bool] = lambda: False
    ) -> None:
        """While `is_paused()`, requests wait for longer than `wait_s`, unless they ask for less."""
        self._room, self._is_paused = room, is_paused
        self._queue: FairQueue[_Waiting] = FairQueue(max_sequences, max_sequences * QUEUED_TOKENS)
        self.wait_s = wait_s
        self._waiting: dict[Claim, _Waiting] = {}
        self._promised = 0
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

    def limit(self, max_sequences: int, wait_s: float) -> None:
        """Sets new bounds, from the next request on."""
        self._queue.max_sequences, self._queue.max_tokens = max_sequences, max_sequences * QUEUED_TOKENS
        self.wait_s = wait_s

    async def enter(self, claim: Claim) -> None:
        """Waits until the claim's sequences may go to the verifiers.  Raises `Overloaded`."""
        if claim.granted:
            return
        if claim.retry_after_s is not None:
            raise Overloaded(claim.retry_after_s)
        waiting = self._waiting.get(claim)
        if waiting is None:
            caller, tokens = claim.caller, claim.expected_tokens or UNKNOWN_TOKENS
            now = time.monotonic()
            waiting = _Waiting(caller.name, caller.weight, claim.priority, claim.sequences, tokens, now, claim=claim)
            if not self._waiting and self._has_room():
                self._queue.bypass(waiting)
                self._grant(claim)
                return
            self._queue_up(waiting)
        try:
            await asyncio.shield(waiting.admitted)
        except asyncio.CancelledError:
            # A request is cancelled with all of its prompts.
            if self._waiting.get(claim) is waiting:
                self._queue.remove(waiting)
                self._release(waiting)
            raise

    def placed(self, claim: Claim) -> None:
        if claim.promised:
            claim.promised -= 1
            self._promised -= 1

    def free_reserved(self, claim: Claim) -> None:
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
        """Admits waiting requests while there is room."""
        while self._waiting and self._has_room():
            now = time.monotonic()
            waiting = self._queue.pop(now)
            if waiting is not None:
                waiting.claim.queued_s += now - waiting.since
                self._grant(waiting.claim)
                self._release(waiting)

    def abort(self, wanted: Callable[[Claim], bool]) -> list[Claim]:
        """Admits those `wanted` of the waiting claims as aborted: they need no room."""
        found = [waiting for claim, waiting in self._waiting.items() if wanted(claim)]
        for waiting in found:
            self._queue.remove(waiting)
            waiting.claim.granted = waiting.claim.aborted = True
            self._release(waiting)
        return [waiting.claim for waiting in found]

    def fail_all(self, error: type[Unavailable]) -> None:
        for waiting in list(self._waiting.values()):
            self._queue.remove(waiting)
            self._release(waiting, error())

    # Details

    def _has_room(self) -> bool:
        return self._room() - self._promised >= 1

    def _queue_up(self, waiting: _Waiting) -> None:
        """Puts a claim into the queue, which may turn away others or this one.  Raises `Overloaded`."""
        if waiting.claim.wait_s is not None:
            wait_s, paused = min(waiting.claim.wait_s, self.wait_s), self._is_paused()
            expected_s = None if paused else self._queue.expected_wait_s(waiting.flow, waiting.priority, waiting.since)
            if wait_s <= 0 or (expected_s is not None and expected_s > wait_s):
                raise self._turn_away(waiting, wait_s)
            waiting.timer = asyncio.get_running_loop().call_later(wait_s, self._too_late, waiting)
        self._waiting[waiting.claim] = waiting
        for victim in self._queue.push(waiting):
            self._release(victim, self._turn_away(victim))

    def _grant(self, claim: Claim) -> None:
        claim.granted = True
        claim.promised = claim.sequences
        self._promised += claim.sequences

    def _too_late(self, waiting: _Waiting) -> None:
        if waiting.claim.wait_s is not None and waiting.claim.wait_s >= self.wait_s and self._is_paused():
            waiting.timer = asyncio.get_running_loop().call_later(self.wait_s, self._too_late, waiting)
            return
        self._queue.remove(waiting)
        self._release(waiting, self._turn_away(waiting))

    def _turn_away(self, waiting: _Waiting, within_s: float = 0.0) -> Overloaded:
        """The error for a claim that may come again when it would probably be served `within_s`."""
        expected_s = self._queue.expected_wait_s(waiting.flow, waiting.priority, time.monotonic()) or 0.0
        seconds = min(MAX_RETRY_AFTER_S, max(1, math.ceil(expected_s - within_s)))
        self.shed += 1
        waiting.claim.retry_after_s = seconds
        return Overloaded(seconds)

    def _release(self, waiting: _Waiting, error: Exception | None = None) -> None:
        """Ends the wait of a claim that has left the queue."""
        del self._waiting[waiting.claim]
        if waiting.timer is not None:
            waiting.timer.cancel()
        if error is None:
            waiting.admitted.set_result(None)
        else:
            waiting.admitted.set_exception(error)
