"""How to draft in the next step: how many tokens, in how many micro-batches, and with how many outcomes enumerated ahead.

Pure; scheduler's process and thread.  The fixed modes have a fixed plan.  `auto` compares the goodput (tokens per second) of
every plan it may choose, K = 0 included, and changes only when the gain is worth a change.  What a plan costs is measured while
it is in force, per load; what it would cost elsewhere is estimated from the nearest measurement (`costs.Cycles`).  Promising
plans that were never tried at this load, or not for long, are tried for a few steps now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backend.verifier.costs import OFF, STALE_STEPS, Costs, Plan, place_of
from backend.verifier.groups import SMALLEST

GAIN = 1.03
"""A new plan must promise this much more than the present one."""
DWELL_STEPS = 16
"""Steps a plan is kept for at least, unless the load changes."""
RECONSIDER_EVERY = 4
"""Steps between two looks at all plans, which take a few hundred microseconds."""
SETTLE_STEPS = 2
"""Steps after a change that still verify what the plan before asked for."""
PROBE_EVERY = 32
"""Steps between two trials."""
PROBE_STEPS = 7
"""Steps of a trial."""
PROMISING = 0.85
"""Share of the present plan's goodput that a plan must be estimated to have to be tried."""
REVISIT_STEPS = 256
"""Steps without drafts after which drafting is tried whatever its estimate: acceptance is known only by drafting."""


@dataclass(frozen=True)
class Decision:
    """A change of plan with the inputs it was made from, for the records."""

    plan: Plan
    requests: int
    predicted_tokens_per_s: float
    present_tokens_per_s: float
    """The same prediction for the plan that was left."""
    verify_s: float
    draft_s: float
    acceptance_length: float
    hit_rate: float
    """Share of look-ups of outcomes drafted ahead of time that hit."""


class Planner(Protocol):
    """One plan per step."""

    decision: Decision | None
    """The latest change."""
    changes: int

    @property
    def settled(self) -> bool:
        """Whether what is verified now was drafted under the present plan."""
        ...

    def plan(self, requests: int) -> Plan:
        """For the next step, with `requests` requests decoding."""
        ...

    def stepped(self, requests: int, verified: int, seconds: float | None) -> None:
        """The step so planned verified `verified` of `requests` requests, `seconds` after the step before had ended; None:
        the time between holds something else than this plan."""
        ...


class FixedPlanner:
    """The plan of a mode that was asked for."""

    settled = True

    def __init__(self, plan: Plan) -> None:
        self.decision: Decision | None = None
        self.changes = 0
        self._plan = plan

    def plan(self, requests: int) -> Plan:
        """Always the same."""
        return self._plan

    def stepped(self, requests: int, verified: int, seconds: float | None) -> None:
        """Nothing is to be learned."""


class AutoPlanner:
    """Chooses by goodput."""

    def __init__(self, costs: Costs, longest: int, outcomes: int) -> None:
        self.decision: Decision | None = None
        self.changes = 0
        self._costs = costs
        self._longest = longest
        self._outcomes = outcomes
        self._plan: Plan | None = None
        self._place = -1
        self._steps = 0
        self._undrafted = 0
        self._since_trial = 0
        self._trial: Plan | None = None
        self._trial_left = 0
        self._running = OFF
        self._run = 0
        self._clock = 0
        self._due = 0

    def plan(self, requests: int) -> Plan:
        """The present plan unless another one is clearly better, or a trial."""
        chosen = self._choose(requests) if requests else self._plan or OFF
        self._run = self._run + 1 if chosen == self._running else 1
        self._running = chosen
        return chosen

    @property
    def settled(self) -> bool:
        """See `Planner`."""
        return self._run > SETTLE_STEPS

    def stepped(self, requests: int, verified: int, seconds: float | None) -> None:
        """See `Planner`."""
        if seconds is not None and verified and self.settled:
            self._costs.cycles.observe(self._running, requests, seconds / verified, self._clock)

    def tokens_per_s(self, plan: Plan, requests: int) -> float:
        """Estimated goodput."""
        return self._costs.length(plan) / self._costs.per_verification_s(plan, requests)

    def _choose(self, requests: int) -> Plan:
        self._clock += 1
        self._steps += 1
        place = place_of(requests)
        if place != self._place:
            # What is best here is not what was best there; but a load on the border of two must not flap.
            self._place, self._trial = place, None
            self._steps = max(self._steps, DWELL_STEPS - SETTLE_STEPS)
            self._due = self._clock + SETTLE_STEPS
        present = self._plan or OFF
        if self._plan is None or (self._clock >= self._due and self._steps >= DWELL_STEPS and self._trial is None):
            self._due = self._clock + RECONSIDER_EVERY
            present = self._reconsider(requests)
        self._undrafted = 0 if present.k else self._undrafted + 1
        return self._try_out(present, requests)

    def _reconsider(self, requests: int) -> Plan:
        best = max(self._candidates(requests), key=lambda plan: self.tokens_per_s(plan, requests))
        present = self._plan
        if present is None:
            self._plan = best
        elif best != present and (
            present not in self._candidates(requests)
            or self.tokens_per_s(best, requests) > GAIN * self.tokens_per_s(present, requests)
        ):
            self._change(best, requests)
        return self._plan or OFF

    def _try_out(self, present: Plan, requests: int) -> Plan:
        """A plan worth trying in place of the present one, or the present one."""
        if self._trial is not None and self._trial_left > 0:
            self._trial_left -= 1
            return self._trial
        self._trial = None
        self._since_trial += 1
        if self._since_trial >= PROBE_EVERY and self._steps >= DWELL_STEPS:
            self._since_trial = 0
            self._trial = self._worth_trying(present, requests)
            self._trial_left = PROBE_STEPS - 1
        return self._trial or present

    def _worth_trying(self, present: Plan, requests: int) -> Plan | None:
        others = [plan for plan in self._candidates(requests) if plan != present]
        if self._undrafted >= REVISIT_STEPS:
            self._undrafted = 0
            self._costs.fade()
            return max((p for p in others if p.k), key=lambda plan: self.tokens_per_s(plan, requests))
        least = PROMISING * self.tokens_per_s(present, requests)
        untried = [
            (self.tokens_per_s(plan, requests), plan)
            for plan in others
            if self._costs.age(plan, requests, self._clock) > STALE_STEPS
        ]
        if any(plan == OFF for _, plan in untried):
            # Plain steps are what drafting has to beat: what they take is worth knowing before anything else.
            return OFF
        promising = [(estimate, plan) for estimate, plan in untried if estimate >= least]
        return max(promising, key=lambda pair: pair[0])[1] if promising else None

    def _candidates(self, requests: int) -> list[Plan]:
        plans = [OFF]
        for k in range(1, self._longest + 1):
            plans.append(Plan(k))
            if self._outcomes:
                plans.append(Plan(k, outcomes=self._outcomes))
            if requests >= 2 * SMALLEST:
                plans.append(Plan(k, groups=2))
        return plans

    def _change(self, plan: Plan, requests: int) -> None:
        left, costs = self._plan or OFF, self._costs
        self._plan, self._steps, self._trial = plan, 0, None
        self.changes += 1
        share = requests / plan.groups
        self.decision = Decision(
            plan,
            requests,
            self.tokens_per_s(plan, requests),
            self.tokens_per_s(left, requests),
            costs.verify_s(share, plan.k),
            costs.draft_s(share, plan.k) if plan.k else 0.0,
            costs.length(plan),
            costs.ahead_hit_rate,
        )


def make_planner(mode: str, costs: Costs, k: int, outcomes: int) -> Planner:
    """The planner of a remote draft mode."""
    if mode == "auto":
        return AutoPlanner(costs, k, outcomes)
    return FixedPlanner({"sync": Plan(k), "pipelined": Plan(k, groups=2), "ahead": Plan(k, outcomes=outcomes)}[mode])
