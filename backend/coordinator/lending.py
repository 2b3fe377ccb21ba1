"""Which verifiers lend their places to drafters, and when they get them back.  Pure: reports and `now` in, decisions out.

    return    at once, where the verifier is needed: nobody else serves, requests queue, it would speed them up more than its
              drafter does, it has requests itself, or somebody is about to drain, restart or remove it;
              without haste, where nobody has work any more, or the drafter adds too little
    lend      a verifier that has had no work for `idle_s` while others had some, if one more drafter is predicted to add more
              tokens per second than one more verifier would

Both sides are counted in one currency: what a change adds, over what one verifier with work makes now.  What a drafter adds
comes from the assignment policy's own prediction (`Scene.worth`).  What a verifier would add comes from the measured times of
steps of different sizes: n requests on S verifiers make n / (fixed + slope * n / S) tokens a step, so the gain is large where
batches are, and nothing where each verifier has one request or none, as at the end of a long batch.

Calm comes from four things: the two gains must differ by `min_gain`, a loan that nobody needs back lasts `min_lent_s`, a place
that was given back rests for `rest_s`, twice as long after each loan that brought nothing, and nothing is lent while a place
is on its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from backend.config.settings import ElasticSettings
from backend.coordinator.rates import Line
from backend.fleet import LoanMethod

QUEUE_S = 0.2
"""Requests that still wait in a second report are a queue; those of one report alone have just arrived."""
REMEMBERED_S = 300.0
"""Steps of different sizes are compared over so long."""
MOST_DOUBLINGS = 5
"""A place that brought nothing again and again rests 2 ** 5 times as long at most."""
METHODS: tuple[LoanMethod, ...] = ("", "aside", "sleep", "swap")
"""From the one that is given back soonest."""


@dataclass(frozen=True)
class OnLoan:
    """A place that is lent, or about to be."""

    drafter_id: str
    """Empty: not started yet."""
    method: LoanMethod
    lent_at: float | None
    """Since when the drafter has drafted; None: not yet."""


Worth = Callable[[Collection[str], int, Collection[str]], float]
"""Predicted tokens per second of the verifiers that serve, but for some of them, with so many drafters more than there are,
but for some of those: `worth(without_verifiers, more_drafters, without_drafters)`."""


@dataclass(frozen=True)
class Scene:
    """What a decision depends on besides the reports."""

    now: float
    serving: Collection[str]
    """Verifiers that take requests."""
    loans: Mapping[str, OnLoan]
    """By verifier; without those that are being given back."""
    returning: Collection[str]
    """Verifiers that are being given back."""
    blocked: Collection[str]
    """Verifiers that an administrator, or an operation, is about."""
    worth: Worth


@dataclass(frozen=True)
class Lend:
    """The verifier's place goes to a drafter."""

    verifier: str
    note: str


@dataclass(frozen=True)
class Return:
    """The verifier gets its place back."""

    verifier: str
    note: str
    wasted: bool = False
    """The drafter added too little: it is longer until the next time."""


Action = Lend | Return


@dataclass
class _Seen:
    """A verifier by its reports."""

    mark: float
    requests: int
    idle_since: float | None
    queued_since: float | None
    is_queued: bool = False


@dataclass
class Lending:
    """Shown every report, asked a few times a second.  Not thread-safe; one owner calls it."""

    settings: ElasticSettings
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _rests_until: dict[str, float] = field(default_factory=dict)
    _wasted: dict[str, int] = field(default_factory=dict)
    """Loans in a row that brought nothing."""
    _step: Line = field(default_factory=lambda: Line(REMEMBERED_S))
    _noted_at: float | None = None

    def observe(self, verifier_id: str, mark: float, running: int, waiting: int, step_s: float, now: float) -> None:
        """A verifier's report; `mark` is another one in every report, `step_s` its step over the running requests, if known."""
        known = self._seen.get(verifier_id)
        if known is not None and known.mark == mark:
            return
        queued_since = (known.queued_since if known is not None else None) or now
        self._seen[verifier_id] = _Seen(
            mark,
            running + waiting,
            None if running + waiting else (now if known is None or known.idle_since is None else known.idle_since),
            queued_since if waiting else None,
            is_queued=waiting > 0 and now - queued_since >= QUEUE_S,
        )
        if running and step_s > 0:
            self._step.note(running, step_s, 1.0, now - self._noted_at if self._noted_at is not None else 0.0)
            self._noted_at = now

    def forget(self, verifier_id: str) -> None:
        """It is gone, or another process now."""
        self._seen.pop(verifier_id, None)

    def ended(self, verifier_id: str, wasted: bool, now: float) -> None:
        """A place was given back; `wasted` where the loan had brought nothing or failed."""
        count = self._wasted[verifier_id] = self._wasted.get(verifier_id, 0) + 1 if wasted else 0
        self._rests_until[verifier_id] = now + self.settings.rest_s * 2 ** min(count, MOST_DOUBLINGS)

    def decide(self, scene: Scene) -> list[Action]:
        """What to change now; mostly nothing."""
        returns = self._returns(scene)
        if returns or scene.returning:
            return [*returns]
        return [*self._lends(scene)]

    # Returning.

    def _returns(self, scene: Scene) -> list[Return]:
        found: dict[str, Return] = {}
        for verifier in scene.loans:
            if verifier in scene.blocked:
                found[verifier] = Return(verifier, "an administrator's command is about it")
            elif self._requests(verifier):
                found[verifier] = Return(verifier, "it has requests")
        # One that only idles serves while its drafter is still leaving.
        serving = len({*scene.serving, *scene.returning}) + len(found)
        for verifier in sorted(scene.loans.keys() - found.keys(), key=lambda each: self._cost(scene, each)):
            why = self._needed(scene, serving, verifier)
            if why is not None:
                found[verifier] = Return(verifier, why)
                serving += 1
        for verifier in scene.loans.keys() - found.keys():
            if (leave := self._without_use(scene, verifier)) is not None:
                found[verifier] = leave
        return [found[verifier] for verifier in sorted(found)]

    def _needed(self, scene: Scene, serving: int, verifier: str) -> str | None:
        """Why it is needed beside so many verifiers; None: it is not."""
        if serving < max(self.settings.min_serving, 1):
            return "too few verifiers serve"
        requests = self._total(scene.serving)
        if requests and all(self._requests(each) for each in scene.serving) and self._is_queued(scene.serving):
            return "requests queue"
        as_verifier = self._gain_of_serving(requests, serving)
        if as_verifier > self.settings.min_gain and as_verifier > self._gain_of_loan(scene, verifier) + self.settings.min_gain:
            return f"{requests} requests on {serving} verifiers"
        return None

    def _without_use(self, scene: Scene, verifier: str) -> Return | None:
        lent_at = scene.loans[verifier].lent_at
        if lent_at is None or scene.now - lent_at < self.settings.min_lent_s:
            return None
        if all(self._idle_for(each, scene.now) >= self.settings.idle_s for each in scene.serving):
            return Return(verifier, "nobody has work")
        # A lull is not the drafter's fault.
        if self._total(scene.serving) and self._gain_of_loan(scene, verifier) < 0.5 * self.settings.min_gain:
            return Return(verifier, "its drafter adds too little", wasted=True)
        return None

    def _cost(self, scene: Scene, verifier: str) -> tuple[int, str]:
        return METHODS.index(scene.loans[verifier].method), verifier

    # Lending.

    def _lends(self, scene: Scene) -> list[Lend]:
        idle = [each for each in scene.serving if self._may_lend(each, scene)]
        idle.sort(key=lambda each: (-self._idle_for(each, scene.now), each))
        spare = len(scene.serving) - max(self.settings.min_serving, 1)
        requests = self._total(scene.serving)
        coming = sum(loan.lent_at is None for loan in scene.loans.values())
        lent: list[Lend] = []
        for verifier in idle[: max(spare, 0)] if requests else []:
            without = [*(each.verifier for each in lent), verifier]
            gain = self._gain_of_drafter(scene, without, coming + len(lent))
            as_verifier = self._gain_of_serving(requests, len(scene.serving) - len(without))
            if gain <= self.settings.min_gain or gain <= as_verifier:
                break
            lent.append(Lend(verifier, f"idle for {self._idle_for(verifier, scene.now):.0f} s, predicted gain {gain:.0%}"))
        return lent

    def _may_lend(self, verifier: str, scene: Scene) -> bool:
        rested = scene.now >= self._rests_until.get(verifier, -math.inf)
        return rested and verifier not in scene.blocked and self._idle_for(verifier, scene.now) >= self.settings.idle_s

    # Gains, over what one verifier with work makes.

    def _gain_of_drafter(self, scene: Scene, without: Collection[str], coming: int) -> float:
        before, after = (scene.worth(without, coming + more, ()) for more in (0, 1))
        return self._relative(scene, before, after)

    def _gain_of_loan(self, scene: Scene, verifier: str) -> float:
        """What the drafter in its place adds; that of one still on its way, will add."""
        loan = scene.loans[verifier]
        if loan.lent_at is None:
            return self._gain_of_drafter(scene, (), 0)
        return self._relative(scene, scene.worth((), 0, (loan.drafter_id,)), scene.worth((), 0, ()))

    def _relative(self, scene: Scene, before: float, after: float) -> float:
        busy = sum(self._requests(each) > 0 for each in scene.serving)
        return (after / before - 1) * busy if before > 0 else 0.0

    def _gain_of_serving(self, requests: int, serving: int) -> float:
        """What one more verifier adds to `serving` of them, the requests spread evenly."""
        line = self._step.read()
        if line is None or requests <= serving or serving < 1:
            return 0.0
        fixed, slope = line

        def step_s(verifiers: int) -> float:
            return fixed + slope * max(requests / verifiers, 1.0)

        return serving * (step_s(serving) / step_s(serving + 1) - 1) if step_s(serving + 1) > 0 else 0.0

    # What was reported.

    def _requests(self, verifier: str) -> int:
        seen = self._seen.get(verifier)
        return seen.requests if seen is not None else 0

    def _total(self, verifiers: Collection[str]) -> int:
        return sum(self._requests(each) for each in verifiers)

    def _is_queued(self, verifiers: Collection[str]) -> bool:
        return any(self._seen[each].is_queued for each in verifiers if each in self._seen)

    def _idle_for(self, verifier: str, now: float) -> float:
        """Seconds without work; 0 of one that has some or has not reported."""
        seen = self._seen.get(verifier)
        return now - seen.idle_since if seen is not None and seen.idle_since is not None else 0.0
