"""Plans, and what each was measured to take at each load.  Pure; scheduler's process and thread."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

SLOWEST = 0.05
"""Least weight of a newer measurement of a plan's cycle, once there are enough of them for a mean."""
FEW = 4
"""Measurements of a plan below which they say nothing; and what everything measured long ago counts for."""
ENOUGH = 8
"""Measurements from which on their decaying mean counts and no longer their median."""
RENEW_STEPS = 128
"""Steps after which a measurement gives way to what is measured next: machines that others use too are not always as fast."""
MANY_TRIALS = 4.0
"""Trials of a plan beyond which one more says little more; see `Measured.trials`."""
LONGER = 0.25
"""Share of a cycle by which one wait may be longer than usual: a hiccup says nothing of the drafter, many waits do."""
FASTER = 0.7
"""Share of the weight that a step faster than usual has, beside one that is slower."""
FOLLOW = 0.15
"""How far the speed of the machine follows each step."""
FAR = 2.0
"""How much slower or faster than usual the machine may be before that is what is usual."""
HICCUP = 1.5
"""Times the usual that one measurement counts for at most."""


@dataclass(frozen=True)
class Plan:
    """`k` draft tokens per request, verified in `groups` micro-batches, `outcomes` enumerated ahead per request."""

    k: int
    groups: int = 1
    outcomes: int = 0
    lookup: bool = False
    """Drafted from the requests' own text on the verifier, where that is expected to pay; no drafter is asked."""

    @property
    def structure(self) -> tuple[int, bool, bool]:
        """Plans of one structure differ in `k` only."""
        return self.groups if self.k else 0, bool(self.outcomes), self.lookup

    @property
    def remote_k(self) -> int:
        """Draft tokens asked of a drafter per request."""
        return 0 if self.lookup else self.k


OFF = Plan(0)


def place_of(requests: float) -> int:
    """Loads that count as one: half octaves."""
    return round(2 * math.log2(max(requests, 1)))


@dataclass
class Measured:
    """Seconds per verification of one plan at one load, decayed: in steps, and between them.

    Steps are all alike, and only ever too slow when something else has the machine: the faster ones count for more.  What lies
    between is short where drafts were there in time and long where not, so its mean counts.  Steps under prompt lookup are not
    alike (it finds something for more or fewer requests): all of their time counts with its mean.
    """

    step_s: float
    rest_s: float
    at: int
    """The planner's clock, in steps, when last measured."""
    seen: int = 1
    trials: float = 0.0
    """How often it was measured for long enough to say something, decayed."""
    is_uneven: bool = False
    _steps: list[float] = field(default_factory=list)
    _rests: list[float] = field(default_factory=list)
    """The first few, of which the median counts: one hiccup among four would condemn a plan by their mean.  Nothing lower than
    the median: a plan on trial is compared with one whose long measured mean is known, and would look better than it is."""

    @property
    def seconds(self) -> float:
        """Per verification."""
        return self.step_s + self.rest_s

    def observe(self, step_s: float, rest_s: float, clock: int) -> None:
        """One more step."""
        if clock - self.at > RENEW_STEPS:
            self.renew()
        self.seen, self.at = self.seen + 1, clock
        self.trials += 1 / ENOUGH
        if self.is_uneven:
            seconds, weight = step_s + rest_s, max(1 / self.seen, SLOWEST)
            seconds = min(seconds, HICCUP * HICCUP * self.seconds) if self.seen > FEW else seconds
            self.step_s, self.rest_s = 0.0, self.seconds + weight * (seconds - self.seconds)
            return
        if self.seen <= ENOUGH:
            self._steps.append(step_s)
            self._rests.append(rest_s)
            self.step_s, self.rest_s = statistics.median(self._steps), statistics.median(self._rests)
            return
        weight = max(1 / self.seen, SLOWEST)
        slower = step_s > self.step_s
        self.step_s += weight * (FASTER if not slower else 1 - FASTER) * (min(step_s, HICCUP * self.step_s) - self.step_s)
        self.rest_s += weight * (min(rest_s, HICCUP * self.seconds) - self.rest_s)

    def wait(self, rest_s: float, clock: int) -> None:
        """One more time between two steps of a plan that is in force."""
        self.at = clock
        self.rest_s += SLOWEST * min(rest_s - self.rest_s, LONGER * self.seconds)

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long."""
        self.step_s, self.rest_s = factor * self.step_s, factor * self.rest_s
        self._steps, self._rests = [factor * s for s in self._steps], [factor * s for s in self._rests]

    def renew(self) -> None:
        """What was measured so far counts as a few measurements of those to come."""
        if self.seen >= FEW:
            self.seen, self._steps, self._rests = FEW, [self.step_s] * FEW, [self.rest_s] * FEW
            self.trials = min(self.trials, MANY_TRIALS) / 2


@dataclass
class Cycles:
    """What a plan was measured to take at a load: seconds from the end of a step to the end of the next, waiting included,
    divided by the verifications in it.

    Measured whole, because its parts do not add up: a drafter that enumerates outcomes answers others later, and answers
    that lie unread while others are verified cost nothing.

    What a plan takes is kept apart from the speed of the machine, which others may use too and which wanders by more than two
    plans differ.  A plan that is in force for long measures that speed; a plan on trial is measured by it.  So what is compared
    are steps that lay next to each other, and not what each plan took whenever it was last in force.
    """

    measured: dict[tuple[Plan, int], Measured] = field(default_factory=dict)
    """At the machine's usual speed."""
    slowness: float = 1.0
    """How much longer everything takes at present than usual."""

    def observe(self, plan: Plan, requests: int, step_s: float, rest_s: float, clock: int, *, in_force: bool = False) -> None:
        """One step under `plan` with `requests` requests decoding.

        `in_force`: the plan is so for long, not for a trial; if steps take another time now, it is the machine's doing.  What
        lies between them may be the drafter's.
        """
        known = self.measured.get((plan, place_of(requests)))
        if in_force and known is not None and known.seen >= ENOUGH and not known.is_uneven:
            drift = step_s / (known.step_s * self.slowness)
            self.slowness *= min(max(drift, 1 / HICCUP), HICCUP) ** FOLLOW
            known.wait(rest_s / self.slowness, clock)
            self._rebase()
            return
        step_s, rest_s = step_s / self.slowness, rest_s / self.slowness
        if known is None:
            known = Measured(step_s, rest_s, clock, seen=0, is_uneven=plan.lookup)
            self.measured[plan, place_of(requests)] = known
        known.observe(step_s, rest_s, clock)

    def _rebase(self) -> None:
        """What the machine does for long is its usual speed."""
        if not 1 / FAR < self.slowness < FAR:
            for known in self.measured.values():
                known.scale(self.slowness)
            self.slowness = 1.0

    def fade(self) -> None:
        """What is measured next counts for more than what was: what made drafting slow may be over."""
        for plan, place in self.measured:
            if plan.k:
                self.measured[plan, place].renew()

    def at(self, plan: Plan, requests: float) -> float | None:
        """Seconds per verification; None where it was never measured, or hardly."""
        return self.at_place(plan, place_of(requests))

    def at_place(self, plan: Plan, place: int) -> float | None:
        """The same at the load of this place."""
        known = self.measured.get((plan, place))
        return known.seconds * self.slowness if known is not None and known.seen >= FEW else None

    def age(self, plan: Plan, requests: float, clock: int) -> float:
        """Steps since this plan was measured at this load."""
        known = self.measured.get((plan, place_of(requests)))
        return clock - known.at if known is not None and known.seen >= FEW else math.inf

    def trials(self, plan: Plan, requests: float) -> float:
        """How often this plan was measured at this load; 0 where never, or hardly."""
        known = self.measured.get((plan, place_of(requests)))
        return known.trials if known is not None and known.seen >= FEW else 0.0

    def nearest(self, plan: Plan, requests: float) -> tuple[Plan, int] | None:
        """The measurement most like this plan at this load: of its own structure if there is one, then of a near load.

        What drafting costs on top says nothing of plain steps.
        """
        place = place_of(requests)
        known = [key for key, measured in self.measured.items() if measured.seen >= FEW and (plan.k or not key[0].k)]
        return min(
            known,
            key=lambda key: (key[0].structure != plan.structure, abs(key[1] - place), abs(key[0].k - plan.k)),
            default=None,
        )
