"""The order in which waiting requests are served, and which of them a full queue turns away.  Pure: callers pass the time.

Higher priorities are served first.  Within a priority the rule is start-time fair queueing over tokens (Goyal, Vin and Cheng,
1996).  Each key has a virtual clock that advances by tokens / weight per request; the request with the smallest start time is
next.  So competing keys get tokens in proportion to their weights, and a key's own requests stay in order.  No request waits
for ever behind others of its priority.
"""

from collections import OrderedDict, defaultdict, deque
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


class FairQueue(Generic[ItemT]):
    """Holds at most `max_sequences` and `max_tokens`.  A single request may exceed both if no other request waits."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0
        self._flows: dict[tuple[int, str], _Flow[ItemT]] = {}
        """The flow of each key, by priority and the key's name."""
        self._clocks: defaultdict[int, float] = defaultdict(float)
        """Virtual time of each priority."""
        self._grants: deque[tuple[float, int]] = deque(maxlen=GRANTS)

    def __len__(self) -> int:
        return sum(len(flow.items) for flow in self._flows.values())

    def bypass(self, item: Item) -> None:
        """Charges the flow of a request that is served at once, because there is room and no request waits."""
        self._stamp(item)
        self._serve(item)

    def push(self, item: ItemT) -> list[ItemT]:
        """Adds a waiting request.  Returns requests that are turned away to keep the bounds, perhaps this one.

        In the lowest priority, the flow with most waiting tokens for its weight loses its newest request.
        """
        flow = self._stamp(item)
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
        firsts = (flow.first for flow in self._waiting())
        item = min(firsts, key=lambda each: (each.priority, each.start, each.since), default=None)
        if item is not None:
            self._take_out(item)
            self._grants.append((now, item.tokens))
            self._serve(item)
        return item

    def remove(self, item: ItemT) -> None:
        """Takes out a waiting request that was not served, and gives its tokens back to its flow."""
        self._take_out(item)
        self.settle(item.flow, item.weight, item.priority, -item.tokens)

    def settle(self, flow: str, weight: float, priority: int, tokens: int) -> None:
        """Charges a flow for tokens used beyond an estimate; negative: gives tokens back."""
        theirs = self._flows.get((priority, flow))
        if theirs is None and tokens > 0:
            theirs = self._flows[priority, flow] = _Flow(self._clocks[priority])
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
        own = self._flows.get((priority, flow))
        start = max(self._clocks[priority], own.finish if own is not None else 0.0)
        before = 0.0
        for each in self._waiting():
            if each.first.priority < priority:
                before += each.tokens
            elif each.first.priority == priority:
                before += min(each.tokens, max(0.0, start - each.first.start) * each.first.weight)
        return before

    def expected_wait_s(self, flow: str, priority: int, now: float) -> float | None:
        """Seconds that a request that arrives now would wait, at the measured rate; None: not known."""
        rate = self.rate(now)
        return None if rate is None else self.ahead(flow, priority) / rate

    # Details

    def _waiting(self) -> list[_Flow[ItemT]]:
        """The flows with waiting requests."""
        return [flow for flow in self._flows.values() if flow.items]

    def _stamp(self, item: Item) -> _Flow[ItemT]:
        """Sets the item's start time and charges its flow for its tokens.  Returns the flow."""
        flow = self._flows.setdefault((item.priority, item.flow), _Flow())
        paid = max(self._clocks[item.priority], flow.finish)
        # A flow's requests keep their order.  Credit that would break the order is left for a later request.
        item.start = max(paid, flow.last.start) if flow.items else paid
        flow.finish = paid + item.tokens / item.weight
        return flow

    def _serve(self, item: Item) -> None:
        """Advances the clock to a request that is served."""
        self._clocks[item.priority] = max(self._clocks[item.priority], item.start)

    def _take_out(self, item: ItemT) -> None:
        flow = self._flows[item.priority, item.flow]
        del flow.items[item]
        self._count(flow, -item.sequences, -item.tokens)

    def _count(self, flow: _Flow[ItemT], sequences: int, tokens: int) -> None:
        self.sequences += sequences
        self.tokens += tokens
        flow.tokens += tokens

    def _last_of_the_greediest(self) -> ItemT:
        return max(self._waiting(), key=lambda flow: (flow.last.priority, flow.tokens / flow.last.weight)).last
