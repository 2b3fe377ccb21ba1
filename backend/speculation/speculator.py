"""All that is decided about drafts, behind the scheduler: which to verify, which to ask for, whether to wait.  Pure.

Scheduler's process and thread; `now` is in seconds of any monotonic clock.  A step goes through four verbs:

    attach    the draft tokens to verify, by the budget (`budget.py`)
    ask       what ended is looked up among outcomes drafted ahead; drafters are told what to draft next
    hold      until when the next step should wait for drafts that are out (`waiting.py`, `deadlines.py`)
    learn     every draft is compared with the text; chances, look-ups and expectations follow (while the device computes)

Every source of drafts competes in one ranking: fresh drafts, drafts made ahead, and the request's own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from backend.chances import chances
from backend.fleet import LOOKUP, Foretold
from backend.protocol import Block, Draft, NextItem
from backend.speculation.budget import Spent, spend, survivals
from backend.speculation.calibration import Calibration
from backend.speculation.deadlines import Questions
from backend.speculation.guesses import Guesses, Resolved
from backend.speculation.lookups import Lookups
from backend.speculation.pairing import drafter_for
from backend.speculation.step_times import DraftTimes, StepTimes
from backend.speculation.waiting import (
    Ask,
    Asking,
    Choice,
    Foresight,
    Load,
    Outlook,
    Pending,
    Plan,
    Prospect,
    Times,
    waiting_pays,
)

RECONSIDER_EVERY = 16
"""Steps between two looks at what drafts are expected to bring: they cost some hundred microseconds."""
ROOM = 0.5
"""Of the survival that just paid in the last step: drafters stop below it, and the budget may still grow from step to step."""
FEW = 4
"""Outcomes drafted ahead until it is known how many pay."""
CAUGHT_UP = 3
"""Step of a probe from which on drafters have taken in what was not sent to them while nobody asked."""
NOTHING = Choice(Ask.PLAIN, 0, 0.0)


class Source(NamedTuple):
    """Drafts that are learned from together."""

    drafter_id: str
    greedy: bool
    ahead: bool = False

    @property
    def kind(self) -> str:
        """`lookup`, `ahead` or `fresh`."""
        return LOOKUP if self.drafter_id == LOOKUP else "ahead" if self.ahead else "fresh"


@dataclass(frozen=True)
class Hand:
    """A draft for the present length of its request."""

    source: Source
    tokens: list[int]
    signs: list[float]
    survivals: list[float]
    draft_s: float = 0.0
    """Its drafter's compute."""

    @property
    def worth(self) -> float:
        """Draft tokens expected to be accepted."""
        return sum(self.survivals)


@dataclass
class _Request:
    text: list[int]
    """All tokens; the engine's own list, which grows."""
    greedy: bool
    hand: Hand | None = None
    """Of a drafter."""
    own: Hand | None = None
    """Of the text itself, looked up at the length `own_at`."""
    own_at: int = 0
    verified: Hand | None = None
    """What the running step verifies; it may have been cut."""
    block: tuple[str, Block, float] | None = None
    """Outcomes drafted ahead: whose, what they are, and its drafter's compute."""
    outcomes: int = 0
    """How many were asked for."""
    told: Hand | None = None
    """The draft whose outcomes they are."""
    told_at: int = -1
    """The length it is for."""


@dataclass
class Attached:
    """The drafts of one step."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Drafters whose drafts are no longer waited for, once per draft."""
    hurried: bool = False
    """Whether drafters need the features of this step at once."""


class Speculator:
    """One verifier's."""

    def __init__(self, mode: str, longest: int, outcomes: int, lookups: bool, vocab_size: int, longest_wait_s: float) -> None:
        """`mode`: sync, ahead or auto; drafts of at most `longest` tokens, `outcomes` drafted ahead per request."""
        self.step_times = StepTimes()
        self.questions = Questions(longest_wait_s)
        self.foresight = Foresight(outcomes)
        self.changes = 0
        self._fixed = {"sync": Ask.DRAFT, "ahead": Ask.AHEAD}.get(mode)
        self._asking = Asking()
        self._longest, self._vocab_size = longest, vocab_size
        self._few = min(FEW, outcomes)
        if self._fixed is not None:
            self._asking.choice = Choice(self._fixed, longest, 0.0, self._few if self._fixed == Ask.AHEAD else 0)
        self._lookups = Lookups() if lookups else None
        self._guesses = Guesses()
        self._calibrations: dict[Source, Calibration] = {}
        prior = survivals(chances(Calibration(longest).weights, [0.0] * (2 * longest)))
        self._drafted, self._alone = Outlook(longest, prior), Outlook(longest)
        self._fresh_times, self._enumeration_times = DraftTimes(), DraftTimes()
        self._miss_times = DraftTimes(self._fresh_times.passes)
        self._times = Times(self.step_times.at, self._fresh_times.at, self._miss_times.at, self._enumeration_times.at)
        self._prospect: Prospect | None = None
        self._unlearned: dict[str, int] = {}
        self._requests: dict[str, _Request] = {}
        self._ended: dict[str, int] = {}
        self._drafter_ids: list[str] = []
        self._steps = 0
        self._probing, self._probed, self._probes = False, 0, 0
        self._asked_ahead = False
        self._spent_for: tuple[int, list[Hand | None]] = (0, [])
        self._last_spent: Spent | None = None
        self._floor = 0.0
        self._base = 1
        """Tokens of the running step without drafts."""
        self._reconsider_at = 0
        self._step_s: float | None = None
        self._emitted, self._request_s = 0, 0.0
        """Tokens since the last choice, and seconds times requests."""
        self._began = 0.0
        """When the latest step did."""

    # -- drafters ------------------------------------------------------------------------------------------------------

    def set_drafters(self, drafter_ids: Sequence[str]) -> None:
        """The assignment changed."""
        self._drafter_ids = sorted(drafter_ids)
        self.questions.set_drafters(self._drafter_ids)

    def arrived(self, drafter_id: str, draft: Draft, draft_s: float, now: float) -> tuple[str, float | None]:
        """A fresh draft came: `ready`, `late` (not waited for any more), `stale` (not asked for) or `invalid`.

        With it the seconds since it was asked for, if it was.
        """
        waited_s = self.questions.answered(drafter_id, draft.request_id, draft.base_len, now)
        request = self._requests.get(draft.request_id)
        if waited_s is None or request is None:
            return "stale", waited_s
        if draft.base_len > len(request.text):
            return "stale", waited_s
        hand = self._hand(draft.request_id, Source(drafter_id, request.greedy), draft.tokens, draft.signs, draft_s)
        if hand is not None:
            self._take(draft.request_id, request, hand, draft.base_len)
        elif draft.tokens:
            return "invalid", waited_s
        else:
            # There was none, or its first token was below the floor.
            self._compare(draft.request_id, request, [self._floor])
        in_time = draft.base_len == len(request.text)
        if hand is not None and not in_time:
            in_time = self._go_on(draft.request_id, request, hand, request.text[draft.base_len :])
        return ("ready" if in_time else "late"), waited_s

    def timed(self, rows: int, k: int, draft_s: float, queue_s: float, waited_s: float, now: float) -> None:
        """An answer with drafts of at most `k` tokens for `rows` requests was read at `now`, so long after its question.

        If a step ran meanwhile, it came at some time during that: a drafter that is not waited for must not pass for as slow as
        the step, or it would never be waited for.
        """
        if not self._is_telling:
            return
        before_s = self._began - (now - waited_s)
        if before_s >= 0:
            waited_s = max(before_s, min(waited_s, draft_s + queue_s))
        times = self._miss_times if self._asked_ahead else self._fresh_times
        times.observe(rows, k, draft_s, waited_s)

    def take_blocks(self, drafter_id: str, blocks: Sequence[Block], draft_s: float) -> None:
        """Outcomes drafted ahead came in."""
        for block in blocks:
            if (request := self._requests.get(block.request_id)) is not None:
                request.block = drafter_id, block, draft_s
        if self._is_telling and (rows := sum(len(block.outcomes) for block in blocks)):
            k = max(len(outcome.tokens) for block in blocks for outcome in block.outcomes)
            depth = max(len(block.verifying) for block in blocks)
            self._enumeration_times.observe(rows, depth + k, draft_s, draft_s)

    # -- requests ------------------------------------------------------------------------------------------------------

    def ended(self, request_id: str, text: list[int], began: int, greedy: bool) -> None:
        """A step brought the request tokens, from the length `began` on, and it goes on."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(text, greedy)
        request.text = text
        self._ended[request_id] = began

    def release(self, request_id: str) -> None:
        """The request is preempted: nothing of it is verified for a while."""
        self.questions.forget(request_id)
        self._ended.pop(request_id, None)
        if (request := self._requests.get(request_id)) is not None:
            request.hand = request.own = request.block = None

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self.release(request_id)
        self._unlearned.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._learn_from(request_id, [*self._guesses.advance(request_id, request.text), *self._guesses.forget(request_id)])
        for calibration in self._calibrations.values():
            calibration.forget(request_id)
        if self._lookups is not None:
            self._lookups.forget(request_id)

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def choice(self) -> Choice:
        """What is asked for at present."""
        return self._asking.choice if self._drafter_ids else NOTHING

    @property
    def _is_telling(self) -> bool:
        """Whether times and hits say what they would be for long: in the first steps of a probe the drafter catches up."""
        return self.choice.ask != Ask.PLAIN or self._probed >= CAUGHT_UP

    @property
    def plan(self) -> Plan:
        """As records and metrics have it."""
        return Plan(self.choice.k, self.choice.outcomes)

    @property
    def outcomes(self) -> int:
        """Outcomes drafted ahead per request at present."""
        if self.choice.ask == Ask.PLAIN and self._probing:
            # By turns, so that fresh drafts are timed without an enumeration in their way.
            return self._few if self._probes % 2 else 0
        return self.choice.outcomes or (self._few if self._probing else 0)

    def attach(self, decoding: Iterable[str], prefill: int, now: float) -> Attached:
        """The draft tokens of the step that begins, over these requests and `prefill` prompt tokens."""
        attached = Attached(lost=[question.drafter_id for question in self.questions.expire(now)])
        self.questions.stop_waiting()
        self._steps, self._began = self._steps + 1, now
        self._probing = bool(self._drafter_ids) and self._fixed is None and self._asking.stepped()
        self._probed = self._probed + 1 if self._probing else 0
        self._probes += self._probed == 1
        attached.hurried = self._probing or self.choice.ask != Ask.PLAIN
        present = self._present(decoding)
        self._base = max(len(present) + prefill, 1)
        hands, spent = self._spend(present, self._base)
        for (_, request), hand in zip(present, hands, strict=True):
            request.verified = hand
        if spent is not None:
            self._floor = ROOM * spent.threshold
            for (request_id, request), length in zip(present, spent.lengths, strict=True):
                if length and request.verified is not None:
                    attached.tokens[request_id] = request.verified.tokens[:length]
                else:
                    request.verified = None
        for _, request in present:
            request.hand = None
        self._spent_for = (0, [])
        return attached

    def verified(self, request_id: str) -> Hand | None:
        """The draft that the running step verifies for a request; its tokens may have been cut."""
        request = self._requests.get(request_id)
        return request.verified if request is not None else None

    def ask(self, now: float) -> dict[str, list[NextItem]]:
        """What every drafter is to draft for the requests whose step has ended."""
        asks: dict[str, list[NextItem]] = {}
        choice = self.choice
        if self._drafter_ids and (choice.ask != Ask.PLAIN or self._probing):
            k, outcomes = choice.k or self._longest, self.outcomes
            self._asked_ahead = outcomes > 0
            for request_id in self._ended:
                self._ask_for(request_id, k, outcomes, asks, now)
            if outcomes:
                self._cut(asks, k)
            if choice.ask == Ask.PLAIN:
                self.questions.stop_waiting()
        self._unlearned.update(self._ended)
        self._ended.clear()
        return asks

    def _ask_for(self, request_id: str, k: int, outcomes: int, asks: dict[str, list[NextItem]], now: float) -> None:
        request, drafter_id = self._requests[request_id], drafter_for(request_id, self._drafter_ids)
        if drafter_id is None:
            return
        if request.outcomes and request.told_at == self._ended[request_id]:
            self._look_up(request_id, request)
        request.outcomes, request.told_at = outcomes, len(request.text)
        best, length = self._best(request_id, request), len(request.text)
        if best is not None and request.hand is None and best.worth < self._expected().gains[k]:
            # Something is at hand, but a drafter is expected to do better.
            best = None
        request.told = best if outcomes else None
        if best is not None and not outcomes:
            return
        verifying = best.tokens if best is not None else []
        # A probe wants to see the whole draft: what did not pay in a full step may in the next one.
        floor = 0.0 if self._probing else self._floor
        asks.setdefault(drafter_id, []).append(NextItem(request_id, length, k, verifying, outcomes, floor))
        if not verifying:
            self.questions.asked(request_id, length, drafter_id, now)

    def _cut(self, asks: dict[str, list[NextItem]], k: int) -> None:
        """Drafters imagine the ends of what will be verified, `k` tokens at most, and not of all at hand: a pass per token."""
        present = self._present(self._ended)
        spent = self._spend(present, max(len(present), 1))[1]
        cuts = {r: n for (r, _), n in zip(present, spent.lengths, strict=True)} if spent is not None else {}
        for items in asks.values():
            for i, item in enumerate(items):
                if len(item.verifying) > (cut := min(max(cuts.get(item.request_id, 0), 1), k)):
                    items[i] = replace(item, verifying=item.verifying[:cut])

    def judges(self, drafter_id: str) -> list[list[float]]:
        """The weights by which a drafter ends drafts that are not worth going on with: of greedy and of sampled requests."""
        return [self._calibration(Source(drafter_id, greedy)).weights for greedy in (True, False)]

    def hold(self, decoding: Iterable[str], prefill: int, now: float) -> float | None:
        """Until when the next step should wait; it is asked again then.  None: it should begin."""
        deadline = self.questions.deadline()
        if deadline is None or now >= deadline:
            return None
        if self._fixed == Ask.DRAFT:
            return deadline
        present = self._present(decoding)
        missing = [i for i, (request_id, _) in enumerate(present) if request_id in self.questions.pending]
        if not missing:
            return None
        base, k, at = len(present) + prefill, self.choice.k or self._longest, self.step_times.at
        times = self._miss_times if self.choice.ask == Ask.AHEAD else self._fresh_times
        draft_s = times.at(len(missing), k)
        waited_s = now - min(self.questions.pending[present[i][0]].asked_at for i in missing)
        hands, spent = self._spend(present, base)
        rows = [hand.survivals if hand is not None else [] for hand in hands]
        pending = Pending(missing, k, draft_s, waited_s)
        if not waiting_pays(spent or spend(rows, at, base), rows, pending, self._expected(), at, base):
            return None
        return min(deadline, now + max(pending.left_s, draft_s / 8))

    # -- learning ------------------------------------------------------------------------------------------------------

    def stepped(self, tokens: int, seconds: float) -> None:
        """The step that just ended had so many tokens and no prefill."""
        self.step_times.observe(tokens, seconds)
        self._step_s = seconds

    def learn(self, waited_s: float) -> None:
        """What the last step said, before which drafts were waited for so long."""
        if self._lookups is not None:
            self._lookups.begin_step()
        if self._step_s is not None:
            self._request_s += len(self._unlearned) * (self._step_s + waited_s)
        for request_id, began in self._unlearned.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._learn_from(request_id, self._guesses.advance(request_id, request.text))
            if self._step_s is not None:
                self._emitted += len(request.text) - began
            if self._lookups is not None:
                self._lookups.advance(request_id, request.text)
        self._unlearned.clear()
        self._step_s = None
        if self._steps >= self._reconsider_at and self._drafter_ids and self._requests:
            self._reconsider_at = self._steps + RECONSIDER_EVERY
            self._reconsider()

    def load(self, requests: int) -> Load:
        """What drafts would bring a step over so many requests."""
        n, at = max(requests, 1), self.step_times.at
        return Load(n, n, self._alone.prospect(n, n, at), self._drafted.prospect(n, n, at), self.foresight)

    def foretold(self) -> dict[str, Foretold]:
        """How well the chances of drafts were known, by kind of source."""
        found: dict[str, Foretold] = {}
        for source, calibration in self._calibrations.items():
            found[source.kind] = found.get(source.kind, Foretold()).plus(calibration.foretold)
        return found

    def _reconsider(self) -> None:
        load = self.load(min(self._base, len(self._requests)))
        self._prospect = load.drafted
        before = self._asking.choice.ask
        brought = self._emitted / self._request_s if self._request_s else 0.0
        tokens, self._emitted, self._request_s = self._emitted, 0, 0.0
        self._asking.choose(load, self._times, self._fixed, brought, tokens)
        self.changes += self._asking.choice.ask != before

    def _expected(self) -> Prospect:
        if self._prospect is None:
            self._prospect = self.load(self._base).drafted
        return self._prospect

    def _learn_from(self, request_id: str, resolved: Iterable[Resolved]) -> None:
        for draft in resolved:
            source = draft.source
            assert isinstance(source, Source)
            self._calibration(source).observe(request_id, draft.signs, draft.matched, draft.seen)
            if source.drafter_id == LOOKUP and self._lookups is not None:
                self._lookups.scored(request_id, draft.matched, draft.seen)

    # -- drafts at hand ------------------------------------------------------------------------------------------------

    def _present(self, decoding: Iterable[str]) -> list[tuple[str, _Request]]:
        requests = self._requests
        return [(request_id, requests[request_id]) for request_id in decoding if request_id in requests]

    def _spend(self, present: list[tuple[str, _Request]], base: int) -> tuple[list[Hand | None], Spent | None]:
        """The best draft of each, and how much of it to verify; computed again only once something has changed."""
        hands = [self._best(request_id, request) for request_id, request in present]
        if self._spent_for != (base, hands):
            rows = [hand.survivals if hand is not None else [] for hand in hands]
            self._last_spent = spend(rows, self.step_times.at, base) if any(rows) else None
            self._spent_for = base, hands
        return hands, self._last_spent

    def _best(self, request_id: str, request: _Request) -> Hand | None:
        """The best draft there is for the present length: a drafter's, or the request's own text."""
        hand, own = request.hand, self._own(request_id, request)
        return own if own is not None and (hand is None or own.worth > hand.worth) else hand

    def _own(self, request_id: str, request: _Request) -> Hand | None:
        if self._lookups is None or request.own_at == len(request.text):
            return request.own
        request.own_at = len(request.text)
        tokens, signs = self._lookups.propose(request_id, request.text, self._longest)
        request.own = self._hand(request_id, Source(LOOKUP, request.greedy), tokens, signs, 0.0)
        self._alone.note(request.own.survivals if request.own is not None else [], self._steps)
        if request.own is not None:
            self._note(request_id, request, request.own, request.own_at)
        return request.own

    def _look_up(self, request_id: str, request: _Request) -> None:
        """Takes what was drafted ahead for what the request went on with."""
        block, request.block = request.block, None
        told, hand = request.told, None
        if told is not None and told.source.drafter_id != LOOKUP:
            # Fewer tokens were verified than there were.
            self._go_on(request_id, request, told, request.text[self._ended[request_id] :])
        if request.hand is None and block is not None:
            drafter_id, outcomes, draft_s = block
            said = request.text[outcomes.base_len :]
            is_new = outcomes.base_len == self._ended.get(request_id)
            rank = rank_of(outcomes, said) if said and is_new else None
            if rank is not None:
                found = outcomes.outcomes[rank]
                source = Source(drafter_id, request.greedy, ahead=True)
                hand = self._hand(request_id, source, found.tokens, found.signs, draft_s)
            if self._is_telling and is_new:
                self.foresight.observe(rank, request.outcomes)
        if hand is not None:
            self._take(request_id, request, hand, len(request.text))

    def _go_on(self, request_id: str, request: _Request, hand: Hand, said: list[int]) -> bool:
        """The request has said this since the draft: if they agree, what is left is a draft, unless a better one is at hand."""
        done = len(said)
        if hand.tokens[:done] != said:
            return False
        rest = self._hand(request_id, hand.source, hand.tokens[done:], hand.signs[2 * done :], hand.draft_s)
        if rest is None or (request.hand is not None and request.hand.worth >= rest.worth):
            return False
        request.hand = rest
        return True

    def _take(self, request_id: str, request: _Request, hand: Hand, base_len: int) -> None:
        """It can be verified next if the request is as long as that; it is learned from either way."""
        self._note(request_id, request, hand, base_len)
        self._compare(request_id, request, hand.survivals)
        if base_len == len(request.text):
            request.hand = hand

    def _compare(self, request_id: str, request: _Request, drafted: list[float]) -> None:
        """Survivals of a drafter's answer: with drafters, the request has the better of it and its own text."""
        own = self._own(request_id, request)
        self._drafted.note(max(drafted, own.survivals if own is not None else [], key=sum), self._steps)

    def _note(self, request_id: str, request: _Request, hand: Hand, base_len: int) -> None:
        known = self._guesses.note(request_id, hand.source, base_len, hand.tokens, hand.signs, request.text)
        self._learn_from(request_id, known)

    def _hand(self, request_id: str, source: Source, tokens: list[int], signs: list[float], draft_s: float) -> Hand | None:
        """None for no tokens, and for what cannot be a draft.  What is longer than was asked for is cut."""
        signs = signs or [0.0] * (2 * len(tokens))
        if not tokens or len(signs) != 2 * len(tokens) or not all(0 <= token < self._vocab_size for token in tokens):
            return None
        tokens, signs = tokens[: self._longest], signs[: 2 * self._longest]
        return Hand(source, tokens, signs, survivals(self._calibration(source).chances(request_id, signs)), draft_s)

    def _calibration(self, source: Source) -> Calibration:
        known = self._calibrations.get(source)
        if known is None:
            known = self._calibrations[source] = Calibration(self._longest)
        return known


def rank_of(block: Block, said: Sequence[int]) -> int | None:
    """The place of the outcome that a verification had which ended with the tokens `said`; None: it was not drafted ahead."""
    accepted, token = len(said) - 1, said[-1]
    if block.verifying[:accepted] != list(said[:accepted]):
        return None
    for rank, outcome in enumerate(block.outcomes):
        if outcome.accepted == accepted and outcome.token == token:
            return rank
    return None
