"""The order in which waiting requests are served, and which of them are turned away.  Pure: callers pass the time.

Higher priorities are served first.  Within a priority the rule is start-time fair queueing over tokens (Goyal, Vin and Cheng,
1996).  Each key has a virtual clock that advances by tokens / weight per request; the request with the smallest start time is
next.  So competing keys get tokens in proportion to their weights, and a key's own requests stay in order.  No request waits
for ever behind others of its priority.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

LONGEST_MEMORY_S = 30.0
"""Seconds after which a grant no longer counts for the measured rate."""
GRANTS = 64
"""Most grants that count for the measured rate."""


@dataclass(eq=False, slots=True)
class Item:
    """One waiting request."""

    flow: str
    """Name of its key.  Flows share the fleet by weight."""
    weight: float
    priority: int
    """Smaller numbers are served first."""
    sequences: int
    tokens: int
    """Tokens of its prompts and expected outputs."""
    deadline: float = float("inf")
    """Time at which it is turned away."""
    start: float = 0.0
    """Start time in virtual time; set by the queue."""
    waiting: bool = False


@dataclass(slots=True)
class _Flow:
    finish: float = 0.0
    """Virtual time at which its requests so far, served or waiting, are paid for."""
    debt: float = 0.0
    """Virtual time for tokens used beyond the estimates; negative: below them.  Added to the next request's start time."""
    items: deque[Item] = field(default_factory=deque)
    tokens: int = 0


class _Class:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.flows: dict[str, _Flow] = {}
        self.heap: list[tuple[float, int, Item]] = []
        self.tokens = 0
        self.count = 0

    def stamp(self, item: Item) -> _Flow:
        """Sets the item's start time and charges its flow for its tokens.  Returns the flow."""
        flow = self.flows.setdefault(item.flow, _Flow())
        owed = flow.finish + flow.debt
        item.start = max(self.clock, owed)
        flow.debt = 0.0
        if flow.items and flow.items[-1].start > item.start:
            # A flow's requests keep their order.  Credit that would break the order is left for a later request.
            item.start = flow.items[-1].start
            flow.debt = owed - item.start
        flow.finish = item.start + item.tokens / item.weight
        return flow


class FairQueue:
    """Holds at most `max_sequences` and `max_tokens`.  A single request may exceed both if no other request waits."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0
        self._classes: dict[int, _Class] = {}
        self._deadlines: list[tuple[float, int, Item]] = []
        self._count = 0
        self._number = 0
        self._grants: deque[tuple[float, int]] = deque(maxlen=GRANTS)

    def __len__(self) -> int:
        return self._count

    def bypass(self, item: Item) -> None:
        """Charges the flow of a request that is served at once, because there is room and no request waits."""
        of = self._classes.setdefault(item.priority, _Class())
        of.stamp(item)
        of.clock = item.start
        self._forget_flows(of)

    def push(self, item: Item) -> list[Item]:
        """Adds a waiting request.  Returns requests that are turned away to keep the bounds, perhaps this one.

        In the lowest priority, the flow with most waiting tokens for its weight loses its newest request.
        """
        of = self._classes.setdefault(item.priority, _Class())
        flow = of.stamp(item)
        item.waiting = True
        self._number += 1
        heapq.heappush(of.heap, (item.start, self._number, item))
        if item.deadline != float("inf"):
            heapq.heappush(self._deadlines, (item.deadline, self._number, item))
        flow.items.append(item)
        self._count_in(of, flow, item, 1)
        shed = []
        while self._count > 1 and (self.sequences > self.max_sequences or self.tokens > self.max_tokens):
            # A request that alone exceeds the bounds must not push out others.
            alone = item.waiting and (item.sequences > self.max_sequences or item.tokens > self.max_tokens)
            victim = item if alone else self._last_of_the_greediest()
            self.remove(victim)
            shed.append(victim)
        return shed

    def pop(self, now: float) -> Item | None:
        """Takes out the next request to be served."""
        for priority in sorted(self._classes):
            of = self._classes[priority]
            while of.heap:
                item = heapq.heappop(of.heap)[2]
                if item.waiting:
                    of.clock = max(of.clock, item.start)
                    self._take_out(item)
                    self._grants.append((now, item.tokens))
                    self._forget_flows(of)
                    return item
        return None

    def remove(self, item: Item) -> None:
        """Takes out a request that was not served, and gives its tokens back to its flow."""
        if item.waiting:
            self._take_out(item)
            self.settle(item.flow, item.weight, item.priority, -item.tokens)

    def _take_out(self, item: Item) -> None:
        item.waiting = False
        of = self._classes[item.priority]
        flow = of.flows[item.flow]
        self._count_in(of, flow, item, -1)
        while flow.items and not flow.items[0].waiting:
            flow.items.popleft()
        while flow.items and not flow.items[-1].waiting:
            flow.items.pop()
        if len(of.heap) > 2 * of.count + 64:
            of.heap = [each for each in of.heap if each[2].waiting]
            heapq.heapify(of.heap)
        if len(self._deadlines) > 2 * self._count + 64:
            self._deadlines = [each for each in self._deadlines if each[2].waiting]
            heapq.heapify(self._deadlines)

    def expire(self, now: float) -> list[Item]:
        """Takes out requests whose deadline has passed."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].waiting):
            item = heapq.heappop(self._deadlines)[2]
            if item.waiting:
                self.remove(item)
                late.append(item)
        return late

    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request."""
        while self._deadlines and not self._deadlines[0][2].waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def settle(self, flow: str, weight: float, priority: int, tokens: int) -> None:
        """Charges a flow for tokens used beyond an estimate; negative: gives tokens back."""
        of = self._classes.get(priority)
        if of is None:
            return
        theirs = of.flows.get(flow)
        if theirs is None and tokens > 0:
            theirs = of.flows[flow] = _Flow(of.clock)
        if theirs is not None:
            theirs.debt += tokens / weight

    # What to expect

    def rate(self, now: float) -> float | None:
        """Tokens per second of requests that had to wait and were granted recently; None: not measured."""
        while self._grants and now - self._grants[0][0] > LONGEST_MEMORY_S:
            self._grants.popleft()
        if len(self._grants) < 2:
            return None
        elapsed = now - self._grants[0][0]
        # The first grant only marks the start of the measured time.
        served = sum(tokens for _, tokens in self._grants) - self._grants[0][1]
        return served / elapsed if elapsed > 0 and served > 0 else None

    def ahead(self, flow: str, priority: int) -> float:
        """Tokens that would be served before a request that arrives now."""
        before = float(sum(of.tokens for level, of in self._classes.items() if level < priority))
        of = self._classes.get(priority)
        if of is None:
            return before
        own = of.flows.get(flow)
        start = max(of.clock, own.finish + own.debt if own is not None else 0.0)
        for each in of.flows.values():
            if each.items:
                first = each.items[0]
                before += min(float(each.tokens), max(0.0, start - first.start) * first.weight)
        return before

    def expected_wait_s(self, flow: str, priority: int, now: float) -> float | None:
        """Seconds that a request that arrives now would wait, at the measured rate; None: not known."""
        rate = self.rate(now)
        return None if rate is None else self.ahead(flow, priority) / rate

    # Details

    def __iter__(self) -> Iterator[Item]:
        for of in self._classes.values():
            for flow in of.flows.values():
                yield from (item for item in flow.items if item.waiting)

    def _count_in(self, of: _Class, flow: _Flow, item: Item, sign: int) -> None:
        self.sequences += sign * item.sequences
        self.tokens += sign * item.tokens
        self._count += sign
        of.tokens += sign * item.tokens
        of.count += sign
        flow.tokens += sign * item.tokens

    def _last_of_the_greediest(self) -> Item:
        of = next(self._classes[level] for level in sorted(self._classes, reverse=True) if self._classes[level].count)
        flows = (flow for flow in of.flows.values() if flow.items)
        return max(flows, key=lambda flow: flow.tokens / flow.items[-1].weight).items[-1]

    def _forget_flows(self, of: _Class) -> None:
        """Drops flows that the clock has overtaken, because they do not differ from new ones."""
        if len(of.flows) > 256:
            of.flows = {name: flow for name, flow in of.flows.items() if flow.items or flow.finish + flow.debt > of.clock}
