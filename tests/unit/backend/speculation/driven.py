"""Drives a speculator step by step, with texts known beforehand, a drafter of given skill and simulated times.  Tests only."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend.speculation.candidate import Attached, Candidate, DraftLimits, Request
from backend.speculation.chances import Rule
from backend.speculation.speculator import Speculator
from backend.speculation.waiting import Ask
from backend.wire.drafting import Block, Draft, NextItem, Outcome
from backend.wire.engine import RequestOptions

VOCAB, K, OUTCOMES = 50, 4, 4
STEP_S, TOKEN_S, LONGEST_WAIT_S = 5e-3, 2e-5, 0.1


class Named:
    """A speculator whose requests are called by their names, and begin when they are first called."""

    def __init__(self, mode: str, lookups: bool, vocab: int = VOCAB) -> None:
        self.whole = Speculator(mode, K, OUTCOMES, lookups, vocab, LONGEST_WAIT_S)
        self.requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def begin(self, name: str, options: RequestOptions | None = None, rule: Rule = Rule.GREEDY, prompt_len: int = 0) -> None:
        request = self.whole.candidates.begin(name, options or RequestOptions(), rule, prompt_len)
        self.whole.pair(request, "", "")
        self.requests[name] = request

    def _of(self, names: Iterable[str]) -> list[Request]:
        for name in names:
            if name not in self.requests:
                self.begin(name)
        return [self.requests[name] for name in names]

    def ended(self, name: str, text: list[int], began: int, now: float) -> None:
        (request,) = self._of([name])
        self.whole.ended(request, text, began, now)

    def release(self, name: str) -> None:
        self.whole.release(self.requests[name])

    def finish(self, name: str) -> None:
        self.whole.finish(self.requests.pop(name))

    def attach(
        self, names: Iterable[str], prefill: int, now: float, *, is_early: bool = False, limits: DraftLimits = None
    ) -> Attached:
        return self.whole.attach(self._of(names), prefill, now, is_early=is_early, limits=limits)

    def hold(self, names: Iterable[str], prefill: int, now: float) -> float | None:
        return self.whole.hold(self._of(names), prefill, now)

    def verified(self, name: str) -> Candidate | None:
        """The draft that the running step verifies for a request, uncut."""
        return self.requests[name].verified


def speculator(mode: str = "auto", lookups: bool = False) -> Named:
    """A speculator with one drafter, `d0`."""
    made = Named(mode, lookups)
    made.set_drafters({"d0": ""})
    return made


def one(mode: str = "sync", lookups: bool = False, rule: Rule = Rule.GREEDY) -> tuple[Named, list[int]]:
    """With a request of six tokens whose draft has been asked for."""
    made, text = speculator(mode, lookups), [1, 2, 3, 4, 5, 6]
    made.begin("r", rule=rule)
    made.ended("r", text, 5, 100.0)
    assert [item.base_len for item in made.ask(100.0)["d0"]] == [6]
    return made, text


def sampled(at: int, tokens: list[int], signs: list[float] | None = None) -> Draft:
    """A draft for request `r` that may be judged by rejection, each token drawn from two."""
    rows = np.array([[each, 3] for each in tokens], "<i4").tobytes() + np.full((len(tokens), 2), 0.5, "<f4").tobytes()
    return Draft("r", at, tokens, signs or [8.0, 8.0] * len(tokens), rows)


def all_asks(made: Named, attached: Attached, now: float) -> dict[str, list[NextItem]]:
    """What drafters are to draft after a step: what was asked with it, and what `ask` adds."""
    early: dict[str, list[NextItem]] = {}
    for name, (k, floor) in attached.asks.items():
        request = made.requests[name]
        drafter_id = made.preference.drafter_of(request.pairing)
        if drafter_id is not None:
            early.setdefault(drafter_id, []).append(NextItem(name, len(request.text), k, [], 0, floor, k))
    late = made.ask(now)
    return {drafter_id: early.get(drafter_id, []) + late.get(drafter_id, []) for drafter_id in {**early, **late}}


@dataclass
class Drafter:
    """Each draft token is right with chance `right`, independently; so is the set of outcomes it drafts ahead for."""

    right: float
    draft_s: float = 1e-3
    """Seconds for a draft of `K` tokens; each takes the same time."""
    silent: bool = False


@dataclass
class Turn:
    """One step: the drafts attached to it, the wait before it, and its results."""

    attached: Attached
    asks: list[NextItem]
    """What the drafter is asked after the step."""
    waited_s: float
    accepted: int
    is_early: bool


@dataclass
class Driven:
    """One verifier with `requests` requests that never end."""

    speculator: Named
    drafter: Drafter
    requests: int = 4
    period: int = 0
    """Number of tokens after which texts repeat; 0: random texts."""
    now: float = 100.0
    token_s: float = TOKEN_S
    asking: float = 1.0
    """How many times as long steps are while drafters are asked."""
    prompts_s: float | None = None
    """If given, each other step has a prompt, and drafters that were asked take so many seconds longer before it."""
    tells_all: bool = False
    """Whether the speculator is told of each request's tokens in quiet steps, too."""
    early: bool = False
    """Whether steps begin early when they may."""
    steps: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.truth = {f"r{i}": self._text() for i in range(self.requests)}
        self.texts = {name: truth[:20] for name, truth in self.truth.items()}
        self.arriving: list[tuple[float, float, list[NextItem], bool]] = []
        """When answers come, the drafter's time for them, and what they answer: with fresh drafts, or outcomes."""
        self.drafts: dict[str, list[int]] = {}
        """The latest fresh drafts."""
        for name, text in self.texts.items():
            self.speculator.ended(name, text, len(text) - 1, self.now)
        self._deliver(all_asks(self.speculator, Attached(), self.now))

    def _text(self) -> list[int]:
        dice, length = self.dice, 40_000
        if not self.period:
            return [dice.randrange(VOCAB) for _ in range(length)]
        once = [dice.randrange(VOCAB) for _ in range(self.period)]
        return (once * (length // self.period + 1))[:length]

    def run(self, steps: int) -> list[Turn]:
        return [self.step() for _ in range(steps)]

    def step(self) -> Turn:
        """Waits as the speculator says, verifies, asks for drafts, learns."""
        began = self.now
        self._receive()
        while (until := self.speculator.hold(list(self.texts), 0, self.now)) is not None and until > self.now:
            self.now = min([until, *(at for at, *_ in self.arriving if at > self.now)])
            self._receive()
            self._deliver(self.speculator.ask(self.now))
        self.steps += 1
        has_prompt = self.prompts_s is not None and self.steps % 2 == 0
        if self.prompts_s is not None and has_prompt and self.speculator.choice.ask != Ask.PLAIN:
            self.now += self.prompts_s
        waited_s = self.now - began
        is_early = self.early and self.speculator.may_be_early()
        attached = self.speculator.attach(list(self.texts), 0, self.now, is_early=is_early)
        drafted = sum(len(tokens) for tokens in attached.tokens.values())
        step_s = STEP_S + self.token_s * (len(self.texts) + drafted)
        step_s *= self.asking if attached.features_needed else 1.0
        self.now += step_s
        self.speculator.stepped(len(self.texts), drafted, None if has_prompt else step_s, waited_s)
        accepted = 0
        for name, text in self.texts.items():
            length, draft = len(text), attached.tokens.get(name, [])
            true = self.truth[name][length : length + len(draft) + 1]
            kept = next((i for i, token in enumerate(draft) if token != true[i]), len(draft))
            accepted += kept
            text += true[: kept + 1]
            if self.tells_all or not attached.is_quiet:
                self.speculator.ended(name, text, length, self.now)
        if attached.is_quiet and not self.tells_all:
            self.speculator.passed(len(self.texts))
        self._receive()
        asks = all_asks(self.speculator, attached, self.now)
        self._deliver(asks)
        self.speculator.learn()
        return Turn(attached, asks.get("d0", []), waited_s, accepted, is_early)

    def _deliver(self, asks: dict[str, list[NextItem]]) -> None:
        at, items = self.now, asks.get("d0", []) if not self.drafter.silent else []
        fresh, ahead = [item for item in items if item.is_fresh], [item for item in items if item.outcomes]
        for each, is_fresh in (fresh, True), (ahead, False):
            if each:
                passes = max(item.fresh_k if is_fresh else 1 + item.k for item in each)
                took_s = self.drafter.draft_s * passes / K
                at += took_s
                self.arriving.append((at, took_s, each, is_fresh))

    def _receive(self) -> None:
        came = [each for each in self.arriving if each[0] <= self.now]
        self.arriving = [each for each in self.arriving if each[0] > self.now]
        for _, took_s, items, is_fresh in came:
            if not is_fresh:
                blocks = [self._block(item) for item in items]
                self.speculator.take_blocks("d0", blocks, took_s, self.now)
                continue
            drafts = [Draft(i.request_id, i.base_len, *self._tokens(i.request_id, i.base_len, i.fresh_k)) for i in items]
            self.drafts |= {draft.request_id: draft.tokens for draft in drafts}
            waits = [waited for _, waited in self.speculator.arrived("d0", drafts, took_s, self.now)]
            if longest := max((waited for waited in waits if waited is not None), default=0.0):
                self.speculator.timed(len(items), max(item.fresh_k for item in items), took_s, 0.0, longest, self.now)

    def _tokens(self, name: str, at: int, k: int) -> tuple[list[int], list[float]]:
        """Draft tokens and signs for the text at length `at`."""
        dice, true = self.dice, self.truth[name][at : at + k]
        tokens = [token if dice.random() < self.drafter.right else (token + 1) % VOCAB for token in true]
        return tokens, [0.0] * (2 * k)

    def _block(self, item: NextItem) -> Block:
        """A block of outcomes drafted ahead; with chance `right` it contains the true outcome."""
        name, n = item.request_id, item.base_len
        verifying = self.drafts[name] if item.is_fresh else item.verifying
        true = self.truth[name][n : n + len(verifying) + 1]
        kept = next((i for i, token in enumerate(verifying) if token != true[i]), len(verifying))
        outcomes = [Outcome(0, (true[0] + 2) % VOCAB, [1] * item.k, [0.0] * (2 * item.k))]
        if self.dice.random() < self.drafter.right:
            outcomes.append(Outcome(kept, true[kept], *self._tokens(name, n + kept + 1, item.k)))
        return Block(name, n, verifying, outcomes)
