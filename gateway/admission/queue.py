"""The order in which waiting requests are served, and which of them a full queue turns away.  Pure: callers pass the time.

Higher priorities are served first.  Within a priority the rule is start-time fair queueing over tokens (Goyal, Vin and Cheng,
1996).  Each key has a virtual clock that advances by tokens / weight per request; the request with the smallest start time is
next.  So competing keys get tokens in proportion to their weights, and a key's own requests stay in order.  No request waits
for ever behind others of its priority.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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
    since: float = 0.0
    """When it came.  Of two with the same start time, the earlier one is first."""
    start: float = 0.0
    """Start time in virtual time; set by the queue."""


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(slots=True)
class _Flow(Generic[ItemT]):
    finish: float = 0.0
    """Virtual time at which its requests so far, served or waiting, are paid for."""
    items: OrderedDict[ItemT, None] = field(default_factory=OrderedDict)
    """Its waiting requests, in the order of their start times."""
    tokens: int = 0

    @property
    def first(self) -> ItemT:
        return next(iter(self.items))

    @property
    def last(self) -> ItemT:
        return next(reversed(self.items))


class _Class(Generic[ItemT]):
    """The requests of one priority."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.flows: dict[str, _Flow[ItemT]] = {}

    @property
    def waiting(self) -> list[_Flow[ItemT]]:
        """The flows with waiting requests."""
        return [flow for flow in self.flows.values() if flow.items]

    def stamp(self, item: Item) -> _Flow[ItemT]:
        """Sets the item's start time and charges its flow for its tokens.  Returns the flow."""
        flow = self.flows.setdefault(item.flow, _Flow())
        paid = max(self.clock, flow.finish)
        # A flow's requests keep their order.  Credit that would break the order is left for a later request.
        item.start = max(paid, flow.last.start) if flow.items else paid
        flow.finish = paid + item.tokens / item.weight
        return flow

    def forget_flows(self) -> None:
        """Drops flows that the clock has overtaken, because they do not differ from new ones."""
        if len(self.flows) > 256:
            self.flows = {name: flow for name, flow in self.flows.items() if flow.items or flow.finish > self.clock}


class FairQueue(Generic[ItemT]):
    """Holds at most `max_sequences` and `max_tokens`.  A single request may exceed both if no other request waits."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0
        self._classes: dict[int, _Class[ItemT]] = {}
        self._grants: deque[tuple[float, int]] = deque(maxlen=GRANTS)

    def __len__(self) -> int:
        return sum(len(flow.items) for of in self._classes.values() for flow in of.waiting)

    def bypass(self, item: Item) -> None:
        """Charges the flow of a request that is served at once, because there is room and no request waits."""
        of = self._classes.setdefault(item.priority, _Class())
        of.stamp(item)
        of.clock = item.start
        of.forget_flows()

    def push(self, item: ItemT) -> list[ItemT]:
        """Adds a waiting request.  Returns requests that are turned away to keep the bounds, perhaps this one.

        In the lowest priority, the flow with most waiting tokens for its weight loses its newest request.
        """
        flow = self._classes.setdefault(item.priority, _Class()).stamp(item)
        flow.items[item] = None
        self._count(flow, item.sequences, item.tokens)
        shed: list[ItemT] = []
        while (self.sequences > self.max_sequences or self.tokens > self.max_tokens) and len(self) > 1:
            # A request that alone exceeds the bounds must not push out others.
            alone = not shed and (item.sequences > self.max_sequences or item.tokens > self.max_tokens)
            victim = item if alone else self._last_of_the_greediest()
            self.remove(victim)
            shed.append(victim)
        return shed

    def pop(self, now: float) -> ItemT | None:
        """Takes out the next request to be served."""
        for _, of in sorted(self._classes.items()):
            if flows := of.waiting:
                item = min((flow.first for flow in flows), key=lambda each: (each.start, each.since))
                of.clock = max(of.clock, item.start)
                self._take_out(item)
                self._grants.append((now, item.tokens))
                of.forget_flows()
                return item
        return None

    def remove(self, item: ItemT) -> None:
        """Takes out a waiting request that was not served, and gives its tokens back to its flow."""
        self._take_out(item)
        self.settle(item.flow, item.weight, item.priority, -item.tokens)

    def _take_out(self, item: ItemT) -> None:
        flow = self._classes[item.priority].flows[item.flow]
        del flow.items[item]
        self._count(flow, -item.sequences, -item.tokens)

    def _count(self, flow: _Flow[ItemT], sequences: int, tokens: int) -> None:
        self.sequences += sequences
        self.tokens += tokens
        flow.tokens += tokens

    def settle(self, flow: str, weight: float, priority: int, tokens: int) -> None:
        """Charges a flow for tokens used beyond an estimate; negative: gives tokens back."""
        of = self._classes.get(priority)
        if of is None:
            return
        theirs = of.flows.get(flow)
        if theirs is None and tokens > 0:
            theirs = of.flows[flow] = _Flow(of.clock)
        if theirs is not None:
            theirs.finish += tokens / weight

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
        before = float(sum(each.tokens for level, of in self._classes.items() if level < priority for each in of.waiting))
        of = self._classes.get(priority)
        if of is None:
            return before
        own = of.flows.get(flow)
        start = max(of.clock, own.finish if own is not None else 0.0)
        for each in of.waiting:
            before += min(float(each.tokens), max(0.0, start - each.first.start) * each.first.weight)
        return before

    def expected_wait_s(self, flow: str, priority: int, now: float) -> float | None:
        """Seconds that a request that arrives now would wait, at the measured rate; None: not known."""
        rate = self.rate(now)
        return None if rate is None else self.ahead(flow, priority) / rate

    def _last_of_the_greediest(self) -> ItemT:
        waiting = next(of.waiting for _, of in sorted(self._classes.items(), reverse=True) if of.waiting)
        return max(waiting, key=lambda flow: flow.tokens / flow.last.weight).last
