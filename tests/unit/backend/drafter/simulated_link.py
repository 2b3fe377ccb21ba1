"""Virtual time, and a network in memory that delays and drops messages.  Tests only.

`World` replaces the module `time` and the transport's `Hub`; `SimulatedDrafter` runs the real service.  Nothing here sleeps: a
wait moves the clock to the next event.
"""

from __future__ import annotations

import heapq
import itertools
import random
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from backend.drafter.proposer import Proposer
from backend.drafter.service import DrafterService
from backend.transport import Wire
from backend.wire.drafting import Ahead, Draft, Drafts, Outcome, ToVerifier, decode_to_verifier, encode


@dataclass
class Faults:
    """Faults of the network.  Messages of one socket never overtake each other, those of different sockets may."""

    drop: float = 0.0
    """Probability that a message is lost."""
    delay_s: float = 0.0
    """Longest extra delay of a message."""


class World:
    """The clock, the queue of future events, and the network between one verifier and its drafters."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.chance = random.Random(seed)
        self.faults = Faults()
        self.wire = Wire()
        self.drafters: dict[str, SimulatedDrafter] = {}
        """By address."""
        self.dealers: dict[bytes, SimulatedDealer] = {}
        """By identity."""
        self._polled: list[SimulatedDealer] = []
        self._last: dict[Any, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # The module `time`.

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    # Events.

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), action))

    def advance(self, until: float, woken: Callable[[], bool] = lambda: False) -> None:
        """Runs all events up to the time `until`, or until `woken()` is true."""
        while not woken() and self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if not woken():
            self.now = max(self.now, until)

    def carry(self, link: Any, deliver: Callable[[], None]) -> None:
        """Carries one message, subject to the faults; `deliver` is called when it arrives."""
        if self.chance.random() >= self.faults.drop:
            when = self.now + 1e-4 + self.chance.random() * self.faults.delay_s
            when = self._last[link] = max(when, self._last.get(link, 0.0))
            self.at(when, deliver)

    # The engine thread's hub.

    def dealer(self, address: str, server_key: str = "") -> SimulatedDealer:
        self._polled.append(SimulatedDealer(self, address))
        return self._polled[-1]

    def drop(self, dealer: SimulatedDealer) -> None:
        self._polled.remove(dealer)
        dealer.close()

    def poll(self, seconds: float) -> bool:
        self.advance(self.now + seconds, lambda: any(dealer.inbox for dealer in self._polled))
        return True

    def wake(self) -> None:
        pass


class SimulatedDealer:
    """A verifier's socket."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self._drafter, self.identity = world, world.drafters[address], uuid.uuid4().bytes
        self.inbox: deque[list[bytes]] = deque()
        world.dealers[self.identity] = self

    def send(self, *frames: bytes) -> bool:
        self._world.carry((self.identity, "to"), lambda: self._drafter.take(self.identity, list(frames)))
        return True

    def receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self._world.dealers.pop(self.identity, None)


class SimulatedDrafter:
    """The real service behind a simulated ROUTER; drafting takes virtual time, which its answers report."""

    def __init__(self, world: World, address: str, make: Callable[[], DrafterService], pass_s: float) -> None:
        """`pass_s`: seconds of a pass.  A batch takes one pass to extend the caches, and one per token of its longest draft."""
        self._world, self._make, self._pass_s = world, make, pass_s
        self.fresh: list[Draft] = []
        """All fresh drafts sent."""
        world.drafters[address] = self
        self.restart()

    def restart(self) -> None:
        """Restarts the drafter at its address, without any state."""
        self.service, self._busy = self._make(), False

    def exchange(self, proposer: Proposer) -> None:
        """Drafts with another proposer from now on."""
        for reply in self.service.replace(proposer):
            self._send(*reply)

    def hang(self, seconds: float) -> None:
        """Works on nothing for so long."""
        self._busy = True
        self._world.at(self._world.now + seconds, partial(self._done, self.service))

    def take(self, identity: bytes, frames: list[bytes]) -> None:
        for reply in self.service.receive(identity, frames):
            self._send(*reply)
        self._work(self.service)

    def _work(self, service: DrafterService) -> None:
        if self._busy or service is not self.service or not service.has_work:
            return
        self._busy = True
        replies = [(identity, decode_to_verifier(payload)) for identity, payload in service.work()]
        made = [draft for _, message in replies for draft in _drafts(message)]
        self.fresh += [draft for draft in made if isinstance(draft, Draft)]
        takes_s = self._pass_s * (1 + max((len(draft.tokens) for draft in made), default=0))
        for identity, message in replies:
            if isinstance(message, Drafts | Ahead):
                message = msgspec.structs.replace(message, draft_us=round(takes_s * 1e6))
            self._world.at(self._world.now + takes_s, partial(self._send, identity, encode(message)))
        self._world.at(self._world.now + takes_s, partial(self._done, service))

    def _done(self, service: DrafterService) -> None:
        if service is self.service:
            self._busy = False
            self._work(service)

    def _send(self, identity: bytes, payload: bytes) -> None:
        def arrive() -> None:
            if identity in self._world.dealers:
                self._world.dealers[identity].inbox.append([payload])

        self._world.carry((identity, "from"), arrive)


def _drafts(message: ToVerifier) -> list[Draft] | list[Outcome]:
    if isinstance(message, Ahead):
        return [outcome for block in message.items for outcome in block.outcomes]
    return message.items if isinstance(message, Drafts) else []
