"""Simulates a verifier that decides by `backend.speculation`, on a machine with known times and acceptance.  Tests only.

Decisions are based on times with noise, drift and hiccups.  Results count the true mean times, so that runs can be compared.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from backend.speculation.budget import survivals
from backend.speculation.calibration import Calibration
from backend.speculation.chances import chances
from backend.speculation.guesses import Guesses
from backend.speculation.step_times import DraftTimes, StepTimes
from backend.speculation.waiting import Ask, Asking, Foresight, Outlook, Pending, StepLoad, Times, waiting_pays
from tests.support.speculator import spent_on

K = 6
TRUE_SIGNS = (0.2, 0.8)
CHOOSE_EVERY = 16


@dataclass(frozen=True)
class Draft:
    """A draft.  The text is all zeros, so a draft token is right if it is 0."""

    signs: list[float]
    tokens: list[int]
    true: list[float]
    """The true survival of each token."""


@dataclass(frozen=True)
class Machine:
    """Times in ms: a step takes `step`, `token` per token and `dense` per token beyond `knee`."""

    step: float = 6.0
    token: float = 0.02
    dense: float = 0.0
    knee: int = 0
    way: float = 0.5
    pass_: float = 0.3
    row: float = 0.01
    """Time per draft pass and request."""
    offsets: tuple[float, ...] = (0.8,)
    """True offsets of the log-odds of acceptance; requests take them in turn."""
    hits: float = 0.8
    """Share of verifications whose outcome was drafted ahead."""
    found: float = 0.0
    """Share of verifications for which a look-up finds a draft."""
    found_accept: float = 0.95
    noise: float = 0.1
    hiccups: float = 0.01
    drift: float = 0.15
    drift_steps: float = 16.0

    def step_ms(self, tokens: float) -> float:
        return self.step + self.token * tokens + self.dense * max(tokens - self.knee, 0)

    def draft_ms(self, rows: float, k: float) -> float:
        return self.way + k * (self.pass_ + self.row * rows) if rows else 0.0

    def draft(self, request: int, dice: random.Random) -> Draft:
        """A random draft of `K` tokens."""
        a, b, offset = *TRUE_SIGNS, self.offsets[request % len(self.offsets)]
        signs = [s for _ in range(K) for s in (dice.gauss(-0.5, 0.5), dice.expovariate(0.7) - 0.5)]
        true = chances([a, b, offset], signs)
        return Draft(signs, [int(dice.random() > c) for c in true], survivals(true))

    def look_up(self, dice: random.Random) -> Draft:
        """A look-up in a request's own text: with chance `found` a draft of `K` tokens, else an empty one."""
        k = K if dice.random() < self.found else 0
        return Draft(
            [0.0] * 2 * k, [int(dice.random() > self.found_accept) for _ in range(k)], survivals([self.found_accept] * k)
        )

    def gain(self, k: int, requests: int) -> float:
        """Mean number of accepted tokens of a draft of `k`, over the requests."""
        dice, seen, classes = random.Random(7), 500, min(requests, len(self.offsets))
        return sum(sum(self.draft(request, dice).true[:k]) for request in range(classes) for _ in range(seen)) / seen / classes

    def best(self, requests: int) -> tuple[float, str]:
        """Tokens per ms and name of the best fixed way: plain decoding, look-ups, or drafts of one length, fresh or ahead."""
        n, h = requests, self.hits
        ways = {"plain": n / self.step_ms(n)}
        any_missing = 1 - h**n
        missing = n * (1 - h) / any_missing if any_missing else 0
        for k in range(1, K + 1):
            found = sum(self.found_accept**j for j in range(1, k + 1)) * self.found
            ways[f"lookup {k}"] = n * (1 + found) / self.step_ms(n * (1 + self.found * k))
            gain, full = self.gain(k, n), self.step_ms(n * (1 + k))
            ways[f"draft {k}"] = n * (1 + gain) / (full + self.draft_ms(n, k))
            going = self.step_ms(n * (1 + h * k))
            if self.draft_ms(n * (1 - h), k) <= going:
                ways[f"ahead {k}, going"] = n * (1 + h * gain) / going
            ways[f"ahead {k}, waiting"] = n * (1 + gain) / (full + any_missing * self.draft_ms(missing, k))
        way = max(ways, key=lambda name: ways[name])
        return ways[way], way


class Verifier:
    """The decisions of the drafting scheduler, without vLLM."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.dice = machine, random.Random(seed)
        self.remote, self.own = Calibration(K), Calibration(K)
        self.times, self.draft_times = StepTimes(), DraftTimes()
        prior = survivals(chances(self.remote.weights, [0.0] * 2 * K))
        self.drafted, self.alone = Outlook(K, prior), Outlook(K)
        self.asking, self.hits, self.guesses = Asking(), Foresight(1, K), Guesses()
        self.asks: list[tuple[Ask, int]] = []
        self.clock, self.load, self.wandered = 0, 0, 0.0
        self.threshold = 0.0

    def run(self, requests: int, steps: int) -> float:
        """Runs `steps` steps; returns tokens per ms."""
        tokens = spent_ms = 0.0
        for _ in range(steps):
            emitted, ms = self._step(requests)
            tokens, spent_ms = tokens + emitted, spent_ms + ms
        return tokens / spent_ms

    def _slow(self) -> float:
        machine, dice = self.machine, self.dice
        self.wandered += -self.wandered / machine.drift_steps
        self.wandered += dice.gauss(0.0, machine.drift * math.sqrt(2 / machine.drift_steps))
        hiccup = 3.0 if dice.random() < machine.hiccups else 1.0
        return max(dice.gauss(1.0, machine.noise), 0.5) * hiccup * math.exp(self.wandered)

    def _step(self, n: int) -> tuple[float, float]:
        """Simulates one step; returns the expected number of tokens by true chances, and true milliseconds."""
        machine, dice, asking = self.machine, self.dice, self.asking
        choice, probes = asking.choice, asking.stepped()
        self.clock += 1
        self.asks.append((choice.ask, choice.k))
        slow = self._slow()
        drafts, lookups = [machine.draft(i, dice) for i in range(n)], [machine.look_up(dice) for _ in range(n)]
        rows = [survivals(self.remote.chances(str(i), draft.signs)) for i, draft in enumerate(drafts)]
        own_rows = [survivals(self.own.chances(str(i), draft.signs)) for i, draft in enumerate(lookups)]
        come = [dice.random() < machine.hits for _ in range(n)]
        if probes or choice.ask == Ask.AHEAD:
            for hit in come:
                self.hits.observe(0 if hit else None, 1, choice.k)
        come = [hit and choice.ask == Ask.AHEAD for hit in come]
        cut = [[s for s in row[: choice.k] if s >= self.threshold] for row in rows]

        def offer() -> tuple[list[list[float]], list[bool]]:
            uses = [come[i] and sum(cut[i]) >= sum(own_rows[i]) for i in range(n)]
            return [cut[i] if uses[i] else own_rows[i] for i in range(n)], uses

        offered, uses = offer()
        spent, waited = spent_on(offered, self.times.at, n), 0.0
        out = [i for i in range(n) if not come[i]]
        if choice.ask != Ask.PLAIN and out:
            draft_s = self.draft_times.at(len(out), choice.k)
            pending = Pending(out, choice.k, draft_s, 0.0)
            pays = waiting_pays(spent, offered, pending, self.prospect, self.times.at, n)
            drafted = max(1, *(len(cut[i]) for i in out))
            ms = machine.draft_ms(len(out), drafted)
            self.draft_times.observe(len(out), drafted, (ms - machine.way) * slow / 1e3, ms * slow / 1e3)
            if pays:
                waited, come = ms, [True] * n
                offered, uses = offer()
                spent = spent_on(offered, self.times.at, n)
        elif probes:
            ms = machine.draft_ms(n, K)
            self.draft_times.observe(n, K, (ms - machine.way) * slow / 1e3, ms * slow / 1e3)
        self.threshold = 0.0 if probes or choice.ask == Ask.PLAIN else spent.threshold
        step_ms, expected = machine.step_ms(n + spent.tokens), float(n)
        self.times.observe(n + spent.tokens, step_ms * slow / 1e3)
        for i, length in enumerate(spent.lengths):
            used = drafts[i] if uses[i] else lookups[i]
            expected += sum(used.true[:length])
        asked = probes or choice.ask != Ask.PLAIN
        for i in range(n):
            self._learn(str(i), drafts[i] if asked else None, lookups[i])
            self.alone.note(own_rows[i], self.clock)
            if asked:
                self.drafted.note(max(rows[i], own_rows[i], key=sum), self.clock)
        if n != self.load or self.clock % CHOOSE_EVERY == 0:
            self._choose(n)
        return expected, step_ms + waited

    def _learn(self, request_id: str, draft: Draft | None, lookup: Draft) -> None:
        if draft is not None:
            self.guesses.note(request_id, "remote", 1, draft.tokens, draft.signs, [0])
        self.guesses.note(request_id, "own", 1, lookup.tokens, lookup.signs, [0])
        for known in self.guesses.advance(request_id, [0] * (1 + K)):
            calibration = self.remote if known.source == "remote" else self.own
            calibration.observe(request_id, known.signs, known.matched, known.seen)

    def _choose(self, n: int) -> None:
        self.load, at, times = n, self.times.at, self.times.row(n, n * K + 2)
        self.prospect = self.drafted.prospect(n, times)
        load = StepLoad(n, n, self.alone.prospect(n, times), self.prospect, self.hits)
        self.asking.choose(load, Times(at, at, self.draft_times.at, lambda rows, k: 0.0))
