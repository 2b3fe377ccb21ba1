"""Virtual time, and a network in memory that delays, drops, duplicates and reorders messages.  Tests only.

`SimulatedHub` and `SimulatedDealer` replace the transport's `Hub` and `Dealer`; `SimulatedDrafter` runs the real service behind
them.  Nothing here sleeps: a wait moves the clock to the next event.
"""

from __future__ import annotations

import heapq
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backend.drafter.service import DrafterService
from backend.transport import Wire
from backend.wire.drafting import Ahead, Drafts, decode_to_verifier, encode


class World:
    """The clock, which can also replace the module `time`, and the queue of future events."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.chance = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (max(when, self.now), self._number, action))

    def advance(self, until: float, woken: Callable[[], bool] = lambda: False) -> None:
        """Runs all events up to the time `until`, or until `woken()` is true."""
        while not woken() and self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if not woken():
            self.now = max(self.now, until)


@dataclass
class Faults:
    """Faults of the network: probabilities of a drop and of a duplicate, delay and reordering."""

    drop: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.0
    """Longest extra delay of a message."""
    reorder: bool = False
    """Whether messages of one socket may overtake each other; messages of different sockets always may."""


@dataclass
class Network:
    """The drafters and dealers of the network, by address."""

    world: World
    faults: Faults = field(default_factory=Faults)
    drafters: dict[str, SimulatedDrafter] = field(default_factory=dict)
    dealers: dict[tuple[str, bytes], SimulatedDealer] = field(default_factory=dict)
    """By the address that a dealer is connected to, and its identity there."""
    _last: dict[Any, float] = field(default_factory=dict)

    def carry(self, link: Any, deliver: Callable[[], None]) -> None:
        """Carries one message, subject to the faults; `deliver` is called when it arrives."""
        faults, chance, world = self.faults, self.world.chance, self.world
        for _ in range(1 + (chance.random() < faults.twice)):
            if chance.random() < faults.drop:
                continue
            when = world.now + 1e-4 + chance.random() * faults.delay_s
            if not faults.reorder:
                when = self._last[link] = max(when, self._last.get(link, 0.0))
            world.at(when, deliver)


class SimulatedDealer:
    """A verifier's socket."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address, self.identity = network, address, uuid.uuid4().bytes
        self.inbox: deque[list[bytes]] = deque()
        network.dealers[address, self.identity] = self

    def send(self, *frames: bytes) -> bool:
        self._network.carry((self._address, self.identity, "to"), lambda: self._deliver(list(frames)))
        return True

    def receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self._network.dealers.pop((self._address, self.identity), None)

    def _deliver(self, frames: list[bytes]) -> None:
        drafter = self._network.drafters.get(self._address)
        if drafter is not None:
            drafter.take(self.identity, frames)


class SimulatedHub:
    """The engine thread's sockets."""

    def __init__(self, network: Network) -> None:
        self.wire = Wire()
        self._network = network
        self._dealers: list[SimulatedDealer] = []

    def dealer(self, address: str, server_key: str = "") -> SimulatedDealer:
        self._dealers.append(SimulatedDealer(self._network, address))
        return self._dealers[-1]

    def drop(self, dealer: SimulatedDealer) -> None:
        self._dealers.remove(dealer)
        dealer.close()

    def poll(self, seconds: float) -> bool:
        world = self._network.world
        world.advance(world.now + seconds, lambda: any(dealer.inbox for dealer in self._dealers))
        return True

    def wake(self) -> None:
        pass


class SimulatedDrafter:
    """The real service behind a simulated ROUTER; drafting takes virtual time, which its answers report."""

    def __init__(self, network: Network, address: str, make: Callable[[], DrafterService], pass_s: float) -> None:
        """`pass_s`: seconds of a pass.  A batch takes one pass to extend the caches, and one per token of its longest draft."""
        self._network, self._address, self._make, self.pass_s = network, address, make, pass_s
        self.service = make()
        self.drafted: set[tuple[str, int, tuple[int, ...]]] = set()
        """All drafts sent: request, base length, tokens."""
        self._busy = False
        network.drafters[address] = self

    def restart(self) -> None:
        """Restarts the drafter at its address, without any state."""
        self.service, self._busy = self._make(), False

    def take(self, identity: bytes, frames: list[bytes]) -> None:
        self._send(self.service.receive(identity, frames), 0.0)
        self._work(self.service)

    def _work(self, service: DrafterService) -> None:
        if self._busy or service is not self.service or not service.has_work:
            return
        self._busy = True
        replies = service.work()
        longest = max((len(tokens) for _, payload in replies for _, _, tokens in _drafts(payload)), default=0)
        takes_s = self.pass_s * (1 + longest)
        self._send([(identity, _timed(payload, takes_s)) for identity, payload in replies], takes_s)
        self._network.world.at(self._network.world.now + takes_s, lambda: self._done(service))

    def _done(self, service: DrafterService) -> None:
        if service is self.service:
            self._busy = False
            self._work(service)

    def _send(self, replies: list[tuple[bytes, bytes]], after: float) -> None:
        for identity, payload in replies:
            self.drafted.update(_drafts(payload))

            def leave(identity: bytes = identity, payload: bytes = payload) -> None:
                self._network.carry((self._address, identity, "from"), lambda: self._arrive(identity, payload))

            self._network.world.at(self._network.world.now + after, leave)

    def _arrive(self, identity: bytes, payload: bytes) -> None:
        dealer = self._network.dealers.get((self._address, identity))
        if dealer is not None:
            dealer.inbox.append([payload])


def _drafts(payload: bytes) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """The drafts in an answer: request, base length, tokens."""
    message = decode_to_verifier(payload)
    if isinstance(message, Drafts):
        yield from ((draft.request_id, draft.base_len, tuple(draft.tokens)) for draft in message.items)
    elif isinstance(message, Ahead):
        for block in message.items:
            yield from ((block.request_id, block.base_len + o.accepted + 1, tuple(o.tokens)) for o in block.outcomes)


def _timed(payload: bytes, seconds: float) -> bytes:
    """The answer, with `seconds` as the drafter's compute time."""
    message = decode_to_verifier(payload)
    if isinstance(message, Drafts | Ahead):
        message = msgspec.structs.replace(message, draft_us=round(seconds * 1e6))
    return encode(message)
