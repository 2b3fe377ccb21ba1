"""Whether to wait for drafts, and which drafts to ask for: whatever is expected to emit the most tokens per second.

Pure; scheduler's process and thread.  What drafts would bring is expected from the survivals of those that came, put through
the budget at the present load (`Outlook`).  No plan has to be tried out: drafts are scored verified or not, and one curve
of step times serves all plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from backend.speculation.budget import Spent, spend

GAIN = 1.02
"""What drafters must promise over plain steps, since they can serve somebody else, and what a change must promise on top,
which costs a step or two without drafts."""
PROBE_EVERY, PROBE_STEPS = 128, 4
"""While drafters are not asked, or not ahead, they are for so many steps in so many, and nobody waits: their drafts are scored
all the same."""
ROWS, FEWEST, RECENT_STEPS = 64, 8, 512
"""Drafts an outlook is made from; the newest few count however old they are."""
FORGET, PRIOR_HITS, PRIOR_LOOKS = 0.99, 6.0, 8.0
"""Weight of a look-up of an outcome after one newer one, and what is believed before the first: that it is worth trying."""

DOUBTFUL, TRUST, FADE = 256, 0.4, 0.99
"""How a kind keeps its promises: a window of so many tokens says as much as all before it, and no window weighs more than
`TRUST`, for the machine's speed wanders; what is left after a window without it is half in some thousand steps, so that it is
tried again."""

DraftSeconds = Callable[[float, int], float]
"""From asking to having drafts for so many requests of so many tokens (`step_times.DraftTimes.at`)."""


@dataclass(frozen=True)
class Prospect:
    """What drafts are expected to add to a step per request, cut after 0, 1, .. K tokens: verified tokens, accepted ones."""

    tokens: tuple[float, ...]
    gains: tuple[float, ...]


class Outlook:
    """What the drafts of a step would bring, from the survivals of those that came lately."""

    def __init__(self, k: int, prior: Sequence[float] = ()) -> None:
        """Drafts of at most `k` tokens; `prior`: survivals believed before any came, none for none."""
        self._k = k
        self._rows: deque[tuple[int, list[float]]] = deque(maxlen=ROWS)
        self._prior = list(prior[:k])

    def note(self, survivals: Sequence[float], step: int) -> None:
        """The survivals of a draft, in step number `step`; empty where there was none.

        What its drafter left out as unlikely goes on falling as it fell last.
        """
        row = list(survivals[: self._k])
        if row:
            falls = row[-1] / row[-2] if len(row) > 1 and row[-2] > 0 else row[-1]
            while len(row) < self._k:
                row.append(row[-1] * falls)
        self._rows.append((step, row))
        while len(self._rows) > FEWEST and self._rows[0][0] < step - RECENT_STEPS:
            self._rows.popleft()

    def prospect(self, requests: int, base: int, step_s: Callable[[int], float]) -> Prospect:
        """Were there such drafts for all of `requests` requests in a step of `base` tokens.

        The rows are dealt into steps of so many requests each, and every step spends its budget.  Costs about a microsecond per
        token of the rows, so it is for where nothing waits, and not for every step.
        """
        rows = [row for _, row in self._rows] or [self._prior]
        rows = [rows[i % len(rows)] for i in range(max(-(-len(rows) // requests), 1) * requests)]
        times = [step_s(base + n) for n in range(requests * self._k + 2)]
        tokens, gains = [0.0] * (self._k + 1), [0.0] * (self._k + 1)
        for start in range(0, len(rows), requests):
            dealt = rows[start : start + requests]
            for row, length in zip(dealt, spend(dealt, times).lengths, strict=True):
                for j in range(length):
                    tokens[j + 1] += 1
                    gains[j + 1] += row[j]
        for cumulative in (tokens, gains):
            for j in range(self._k):
                cumulative[j + 1] += cumulative[j]
        return Prospect(tuple(n / len(rows) for n in tokens), tuple(s / len(rows) for s in gains))


class Foresight:
    """How often what happened was among the outcomes drafted ahead, by how many these are; decayed."""

    def __init__(self, most: int) -> None:
        """At most `most` outcomes per request; they come likeliest first."""
        # Each next one is believed to be half as likely, and all of them together to be most of what happens.
        self._hits: list[float] = [PRIOR_HITS / 2 ** (rank + 1) for rank in range(most)]
        self._looks = [PRIOR_LOOKS] * most

    @property
    def choices(self) -> list[int]:
        """How many outcomes may be asked for: powers of two."""
        return [1 << i for i in range(len(self._hits).bit_length())]

    def observe(self, rank: int | None, asked: int) -> None:
        """Of `asked` outcomes, which came in time, the one in place `rank` happened, or none of them."""
        for i in range(min(asked, len(self._hits))):
            self._hits[i] = FORGET * self._hits[i] + (i == rank)
            self._looks[i] = FORGET * self._looks[i] + 1

    def rate(self, outcomes: int) -> float:
        """Share of verifications whose outcome is among so many."""
        return min(1.0, sum(hits / looks for hits, looks in zip(self._hits[:outcomes], self._looks, strict=False)))


@dataclass(frozen=True)
class Pending:
    """Drafts that are out while a step could begin.  Times in seconds."""

    missing: Sequence[int]
    """Places of the requests whose drafts are out."""
    k: int
    """Tokens per draft, as asked for."""
    draft_s: float
    """How long they take, from when they were asked for."""
    waited_s: float
    """Since then."""

    @property
    def left_s(self) -> float:
        """What is left to wait.  Drafts that are overdue are expected to take as long again as they are overdue."""
        return abs(self.draft_s - self.waited_s)


def waiting_pays(
    at_hand: Spent,
    survivals: Sequence[Sequence[float]],
    pending: Pending,
    prospect: Prospect,
    step_s: Callable[[float], float],
    base: int,
) -> bool:
    """Whether a step should wait for drafts that are out, rather than go with those at hand, as spent on `survivals`.

    A request may have another draft at hand, of its own text: what is out counts where it is expected to bring more.
    """
    more = more_tokens = 0.0
    for i in pending.missing:
        length = at_hand.lengths[i]
        better = prospect.gains[pending.k] - sum(survivals[i][:length])
        if better > 0:
            more, more_tokens = more + better, more_tokens + prospect.tokens[pending.k] - length
    seconds = step_s(base + at_hand.tokens + more_tokens) + pending.left_s
    going = len(survivals) + at_hand.gained
    return more > 0 and (going + more) / seconds > going / at_hand.seconds


class Ask(StrEnum):
    """Which drafts are asked for."""

    PLAIN = "plain"
    """None; requests' own text may draft."""
    DRAFT = "draft"
    """The next ones, once an outcome is known."""
    AHEAD = "ahead"
    """Those of likely outcomes, while they are being verified."""


@dataclass(frozen=True)
class Load:
    """What the next steps run over and what drafts would bring.  Times in seconds."""

    requests: int
    """Decoding."""
    base: int
    """Tokens of a step without drafts."""
    alone: Prospect
    """Of what needs no drafter: the requests' own text."""
    drafted: Prospect
    """Of all there would be with drafters."""
    foresight: Foresight


@dataclass(frozen=True)
class Choice:
    """What to ask for, with the goodput it promises."""

    ask: Ask
    k: int
    """Tokens per draft; 0 for `PLAIN`."""
    tokens_per_s: float
    outcomes: int = 0
    """Per request; for `AHEAD`."""


class Times(NamedTuple):
    """What was measured, in seconds."""

    step: Callable[[float], float]
    """Of a step of so many tokens."""
    draft: DraftSeconds
    """Of fresh drafts."""
    miss: DraftSeconds
    """Of fresh drafts where outcomes are enumerated ahead."""
    enumerate: DraftSeconds
    """Of drafting ahead for so many outcomes, over all requests."""


def goodputs(load: Load, times: Times) -> dict[Ask, Choice]:
    """The best of each kind."""
    n, alone, drafted, step_s = load.requests, load.alone, load.drafted, times.step
    plain_tokens, plain_gain = alone.tokens[-1], alone.gains[-1]
    plain = n * (1 + plain_gain) / step_s(load.base + n * plain_tokens)
    best = {Ask.PLAIN: Choice(Ask.PLAIN, 0, plain)}

    def consider(ask: Ask, k: int, tokens_per_s: float, outcomes: int = 0) -> None:
        if ask not in best or tokens_per_s > best[ask].tokens_per_s:
            best[ask] = Choice(ask, k, tokens_per_s, outcomes)

    for k in range(1, len(drafted.tokens)):
        emitted, seconds = n * (1 + drafted.gains[k]), step_s(load.base + n * drafted.tokens[k])
        consider(Ask.DRAFT, k, emitted / (seconds + times.draft(n, k)))
        for outcomes in load.foresight.choices:
            h = load.foresight.rate(outcomes)
            # A pass per token that is verified, then one per token of the outcomes' drafts.
            if times.enumerate(n * outcomes, 2 * k) > max(seconds - times.draft(n * (1 - h), k), 0.0):
                # What is not enumerated while the step runs, beside what was missed, comes too late: a batch is sent whole.
                h = 0.0
            gain = plain_gain + h * (drafted.gains[k] - plain_gain)
            tokens = plain_tokens + h * (drafted.tokens[k] - plain_tokens)
            going = n * (1 + gain) / step_s(load.base + n * tokens)
            any_missing = 1 - h**n
            missing = n * (1 - h) / any_missing if any_missing > 0 else 0.0
            consider(Ask.AHEAD, k, max(going, emitted / (seconds + any_missing * times.miss(missing, k))), outcomes)
    return best


class Plan(NamedTuple):
    """What drafters are asked for: tokens per draft at most, and outcomes ahead per request."""

    k: int
    outcomes: int = 0


class Promises:
    """How much of what it promised each kind of asking brings.

    Promises are made of steps, drafts and chances, each measured by itself.  What comes of all three together (a drafter that
    is asked for more than it can make, cores that slow each other) shows in the tokens alone.
    """

    def __init__(self) -> None:
        self._logs: dict[Ask, float] = {}

    def kept(self, ask: Ask) -> float:
        """Of a kind's promise, in the mean; 1 while nothing is known."""
        return math.exp(self._logs.get(ask, 0.0))

    def observe(self, ask: Ask, promised: float, brought: float, tokens: int) -> None:
        """In the last window `ask` was asked for: a rate as promised, and as it came, of so many tokens."""
        before = self._logs.get(ask, 0.0)
        self._logs = {other: FADE * known for other, known in self._logs.items()}
        weight = min(tokens / (tokens + DOUBTFUL), TRUST)
        self._logs[ask] = before + weight * (math.log(brought / promised) - before)


class Asking:
    """What one verifier asks its drafters for."""

    def __init__(self) -> None:
        self.choice = Choice(Ask.PLAIN, 0, 0.0)
        self.promises = Promises()
        self._steps, self._requests = 0, 0
        """Since the kind was chosen; decoding at the last choice."""

    def choose(self, load: Load, times: Times, only: Ask | None = None, brought: float = 0.0, tokens: int = 0) -> Choice:
        """The best, or the present kind while nothing is clearly better; with `only`, the best of that kind.

        `brought`: tokens per second of each request since the last choice, from so many tokens in all; 0: not known.
        """
        offers, last, requests = goodputs(load, times), self.choice, self._requests
        self._requests = load.requests
        if brought and last.tokens_per_s and last.ask in offers and requests / 2 < load.requests < requests * 2:
            # Speed and load have wandered meanwhile: what was promised then and would be now are equally good.
            promised = math.sqrt(last.tokens_per_s / requests * offers[last.ask].tokens_per_s / load.requests)
            self.promises.observe(last.ask, promised, brought, tokens)
        if only is not None:
            self.choice = offers[only]
            return self.choice
        worth = {
            ask: offer.tokens_per_s * self.promises.kept(ask) / (GAIN if ask != Ask.PLAIN else 1.0)
            for ask, offer in offers.items()
        }
        best, present = max(worth, key=lambda ask: worth[ask]), self.choice.ask
        if present not in offers or best == Ask.PLAIN or worth[best] > GAIN * worth[present]:
            present = best
        self._steps = self._steps if present == self.choice.ask else 0
        self.choice = offers[present]
        return self.choice

    def stepped(self) -> bool:
        """One more step; whether it probes: asks ahead, and nobody waits for more than the present choice does."""
        self._steps += 1
        return self.choice.ask != Ask.AHEAD and self._steps % PROBE_EVERY < PROBE_STEPS
