"""Decides whether to wait for drafts, and which to ask for: whatever is expected to emit the most tokens per second.

Pure; scheduler's process and thread.  `outlook.py` predicts the gain of drafts.  No plan has to be tried out: drafts are scored
whether or not they are verified, and one curve of step times serves all plans.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from backend.speculation.budget import Spent
from backend.speculation.outlook import Foresight, Prospect, StepSeconds

GAIN = 1.02
"""Factor by which asking drafters must beat plain steps, since they could serve another verifier; and a new kind the present
one, since a change costs a step or two without drafts."""
PROBE_EVERY, PROBE_STEPS = 128, 4
"""A probe: drafters that are not asked ahead are for 4 steps in 128.  No step waits for a probe's drafts; they are scored.
Where steps go on without drafts after misses, a probe asks for fresh ones: nothing else would show how long they take.
A pause: for as many steps nobody is asked, and from the second on nothing is verified: steps without drafts are measured."""
IN_DOUBT = 2.0
"""Pauses are made while drafts promise less than twice the tokens of steps without any."""
SPREAD, FEW_TOKENS = 0.12**2, 256
"""Variance of the logarithm of measured over predicted tokens per second, in a window of many tokens; in one of 256
tokens the variance is twice as large."""
DOUBT, WANDER = 0.1**2, 0.02**2
"""Variances of what `Promises` learns of a kind: at first, and the gain in a window of its own."""
FADE = 0.99
"""What is known of a kind fades by 1 % per window of another one, to half in some thousand steps, so that it is tried again."""

DraftSeconds = Callable[[float, int], float]
"""Seconds from asking for drafts to having them, by number of requests and tokens per draft (`step_times.DraftTimes.at`)."""


@dataclass(frozen=True)
class Pending:
    """Drafts that were asked for and have not come, while a step could begin.  Times in seconds."""

    missing: Sequence[int]
    """Indices of the requests whose drafts have not come."""
    k: int
    """Tokens per draft, as asked for."""
    draft_s: float
    """Expected time from asking to having them."""
    waited_s: float
    """Time since they were asked for."""

    @property
    def left_s(self) -> float:
        """Expected time left to wait.  Overdue drafts are expected to take as long again as they are overdue."""
        return abs(self.draft_s - self.waited_s)


def waiting_pays(
    at_hand: Spent, survivals: Sequence[Sequence[float]], pending: Pending, prospect: Prospect, step_s: StepSeconds
) -> bool:
    """Whether a step should wait for `pending` drafts rather than begin with the available ones.

    `survivals`: those of the available drafts, per request; `at_hand`: the budget spent on them.  A pending draft counts by its
    expected gain over the request's available draft.
    """
    more = more_tokens = 0.0
    for i in pending.missing:
        length = at_hand.lengths[i]
        better = prospect.gains[pending.k] - sum(survivals[i][:length])
        if better > 0:
            more, more_tokens = more + better, more_tokens + prospect.tokens[pending.k] - length
    seconds = step_s(len(survivals), at_hand.tokens + more_tokens) + pending.left_s
    going = len(survivals) + at_hand.gained
    return more > 0 and (going + more) / seconds > going / at_hand.seconds


class Ask(StrEnum):
    """Which drafts the drafters are asked for."""

    PLAIN = "plain"
    """No drafts; look-ups may still draft."""
    DRAFT = "draft"
    """A fresh draft after each verification."""
    AHEAD = "ahead"
    """Drafts for likely outcomes of a verification, while it runs."""


@dataclass(frozen=True)
class StepLoad:
    """What the next steps run over, and what drafts are expected to add."""

    requests: int
    """Requests that are decoding."""
    alone: Prospect
    """With look-ups alone, which need no drafter."""
    drafted: Prospect
    """With fresh drafts and look-ups."""
    foresight: Foresight
    ahead: Prospect | None = None
    """With drafts made ahead and look-ups; None: as with fresh ones."""

    @property
    def foreseen(self) -> Prospect:
        """What drafts bring where the outcome was among those drafted ahead."""
        return self.ahead or self.drafted


@dataclass(frozen=True)
class Choice:
    """What to ask for, with the goodput it promises."""

    ask: Ask
    k: int
    """Tokens per draft; 0 for `PLAIN`."""
    tokens_per_s: float
    """Expected, over all requests."""
    outcomes: int = 0
    """Outcomes per request; 0 except for `AHEAD`."""
    miss_k: int = 0
    """Tokens per draft after a miss, for which steps wait; 0: they go on without, and for all but `AHEAD`."""


class Times(NamedTuple):
    """Predictions from measured times, in seconds."""

    plain: StepSeconds
    """A step in which no drafter is asked."""
    step: StepSeconds
    """A step in which drafters are asked."""
    draft: DraftSeconds
    """Fresh drafts."""
    enumerate: DraftSeconds
    """Drafting ahead, by the outcomes of all requests together."""


def goodputs(load: StepLoad, times: Times) -> dict[Ask, Choice]:
    """The choice of each kind that emits the most tokens per second."""
    n, alone, drafted = load.requests, load.alone, load.drafted
    plain_tokens, plain_gain = alone.tokens[-1], alone.gains[-1]
    plain = n * (1 + plain_gain) / alone.seconds(times.plain, n, plain_tokens)
    best = {Ask.PLAIN: Choice(Ask.PLAIN, 0, plain)}

    def consider(ask: Ask, k: int, tokens_per_s: float, outcomes: int = 0, miss_k: int = 0) -> None:
        if ask not in best or tokens_per_s > best[ask].tokens_per_s:
            best[ask] = Choice(ask, k, tokens_per_s, outcomes, miss_k)

    hits = {
        outcomes: tuple([load.foresight.rate(outcomes, each) for each in of.tokens] for of in (load.foreseen, drafted))
        for outcomes in load.foresight.choices
    }
    for k in range(1, len(drafted.tokens)):
        emitted, seconds = n * (1 + drafted.gains[k]), drafted.seconds(times.step, n, drafted.tokens[k])
        consider(Ask.DRAFT, k, emitted / (seconds + times.draft(n, k)))
        for outcomes, (after_hits, after_misses) in hits.items():
            enumerated_s = times.enumerate(n * outcomes, k)
            for miss_k in (k, (k + 1) // 2, 0) if k > 1 else (k, 0):
                # A verification of a short draft is foreseen more often than one of a long draft: the share where both balance.
                again, back = after_hits[k], after_misses[miss_k]
                h = back / (1 - again + back) if back else again
                consider(Ask.AHEAD, k, _ahead(load, times, k, miss_k, h, enumerated_s), outcomes, miss_k)
            if enumerated_s > seconds:
                # More would take longer still.
                break
    return best


def _ahead(load: StepLoad, times: Times, k: int, miss_k: int, h: float, enumerated_s: float) -> float:
    """Tokens per second of drafting ahead.

    `miss_k`: tokens of a draft after a miss, for which the step waits; 0: the step goes on without.
    `h`: share of verifications whose outcome is among those drafted ahead.
    """
    n, alone, drafted, foreseen = load.requests, load.alone, load.drafted, load.foreseen
    gain, tokens = (drafted.gains[miss_k], drafted.tokens[miss_k]) if miss_k else (alone.gains[-1], alone.tokens[-1])

    mean = tokens + h * (foreseen.tokens[k] - tokens)
    emitted, seconds = n * (1 + gain + h * (foreseen.gains[k] - gain)), foreseen.seconds(times.step, n, mean)
    # One pass over the verified tokens, then one per token of the outcomes' drafts.
    seconds = max(seconds, enumerated_s)
    if not miss_k:
        return emitted / seconds
    any_missing = 1 - h**n
    missing = n * (1 - h) / any_missing if any_missing > 0 else 0.0
    return emitted / (seconds + any_missing * times.draft(missing, miss_k))


def bearable_s(load: StepLoad, choice: Choice, times: Times) -> float:
    """How long outcomes may take to come: as long as expected, and then until the steps are no faster than without them."""
    n, alone, tokens = load.requests, load.alone.gains[-1], load.foreseen.tokens[choice.k]
    hits = load.foresight.rate(choice.outcomes, tokens)
    gain = max(hits * load.foreseen.gains[choice.k] - alone, 0.0) / (1 + alone)
    return times.enumerate(n * choice.outcomes, choice.k) + gain * times.step(n, n * hits * tokens)


class Plan(NamedTuple):
    """What drafters are asked for: the most tokens per draft, and outcomes drafted ahead per request."""

    k: int
    outcomes: int = 0


@dataclass
class _Level:
    """A logarithm, and its variance."""

    level: float
    doubt: float


class Promises:
    """Learns which part of the predicted tokens per second plain steps reach, and which part steps that drafters are asked for.

    Predictions combine steps, drafts and chances, each measured by itself.  Their effects on each other (a drafter asked for
    more than it can make, cores that slow each other) show only in the tokens emitted.  A Kalman filter each: the first
    windows count most, later it averages many.
    """

    def __init__(self) -> None:
        self._plain, self._asking = _Level(0.0, DOUBT), _Level(0.0, DOUBT)

    def correction(self, ask: Ask) -> float:
        """Measured over predicted tokens per second; 1 while nothing is known."""
        return math.exp((self._plain if ask == Ask.PLAIN else self._asking).level)

    def observe(self, ask: Ask, promised: float, brought: float, tokens: int) -> None:
        """Takes a window in which `ask` was asked for: its predicted and its measured rate, and its tokens."""
        of, other = (self._plain, self._asking) if ask == Ask.PLAIN else (self._asking, self._plain)
        other.level, other.doubt = FADE * other.level, DOUBT + FADE * FADE * (other.doubt - DOUBT)
        doubt = of.doubt + WANDER
        gain = doubt / (doubt + SPREAD * (1 + FEW_TOKENS / max(tokens, 1)))
        of.level += gain * (math.log(brought / promised) - of.level)
        of.doubt = doubt * (1 - gain)


class Asking:
    """Chooses what one verifier asks its drafters for."""

    def __init__(self) -> None:
        self.choice = Choice(Ask.PLAIN, 0, 0.0)
        self.promises = Promises()
        self.paused = 0
        """Steps of the present pause; 0: there is none.  In the first one drafters are still busy."""
        self.is_typical = True
        """Whether the step counted last shows what the choice brings: no pause, nor just behind one, where no draft was due."""
        self._in_doubt, self._unpaused = False, PROBE_EVERY // 2
        self._steps, self._requests = 0, 0
        """Steps since the kind was chosen; requests decoding at the last choice."""

    def choose(self, load: StepLoad, times: Times, only: Ask | None = None, brought: float = 0.0, tokens: int = 0) -> Choice:
        """The best choice; that of the present kind while no other is clearly better.  With `only`, the best of that kind.

        `brought`: measured tokens per second per request since the last choice, from `tokens` tokens in all; 0: not known.
        """
        offers, last, requests = goodputs(load, times), self.choice, self._requests
        self._requests = load.requests
        if brought and last.tokens_per_s and last.ask in offers and requests / 2 < load.requests < requests * 2:
            # Speed and load have changed meanwhile: take the geometric mean of the predictions made then and now.
            promised = math.sqrt(last.tokens_per_s / requests * offers[last.ask].tokens_per_s / load.requests)
            self.promises.observe(last.ask, promised, brought, tokens)
        if only is not None:
            self.choice = offers[only]
            return self.choice
        worth = {
            ask: offer.tokens_per_s * self.promises.correction(ask) / (GAIN if ask != Ask.PLAIN else 1.0)
            for ask, offer in offers.items()
        }
        best, chosen = max(worth, key=lambda ask: worth[ask]), self.choice.ask
        if chosen not in offers or best == Ask.PLAIN or worth[best] > GAIN * worth[chosen]:
            chosen = best
        self._in_doubt = worth[chosen] < IN_DOUBT * load.requests / times.plain(load.requests, 0)
        # Right behind a change nothing needs a probe yet.
        self._steps = self._steps if chosen == self.choice.ask else PROBE_STEPS
        self.choice = offers[chosen]
        return self.choice

    def stepped(self, rests: bool = False) -> bool:
        """Counts a step.  Returns whether it is part of a probe: drafters are asked ahead, but steps wait as without it.

        `rests`: look-ups rest, so that plain steps have no drafts anyway.
        """
        is_probe = self.probes_next
        self._steps += 1
        was_paused, self._unpaused = self.paused, 0 if self.paused else self._unpaused + 1
        begins = self._in_doubt and self._unpaused >= PROBE_EVERY and not (rests and self.choice.ask == Ask.PLAIN)
        self.paused = (was_paused + 1) % (PROBE_STEPS + 1) if was_paused or begins else 0
        self.is_typical = not (self.paused or was_paused)
        return is_probe

    @property
    def probes_next(self) -> bool:
        """What `stepped` returns next."""
        return not self.choice.miss_k and (self._steps + 1) % PROBE_EVERY < PROBE_STEPS
