"""How to draft in the next step: how many tokens, in how many micro-batches, and with how many outcomes enumerated ahead.

Pure; scheduler's process and thread.  The fixed modes have a fixed plan.  `auto` compares the goodput (tokens per second) of
every plan it may choose, K = 0 included, and changes only when the gain is worth a change.  What a plan costs is measured while
it is in force, per load; what it would cost elsewhere is estimated from the nearest measurement (`cycles.py`).

Estimates of plans that were never tried are often too good, and the best of many always is.  So a plan is chosen only once it
was measured at this load; promising ones that were not, or not for long, are tried for a few steps now and then.  What such
trials lose is kept account of, and may be a small part of the time only (`trials.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from backend.verifier.costs import Costs
from backend.verifier.cycles import OFF, Plan, place_of
from backend.verifier.groups import SMALLEST
from backend.verifier.trials import TRIAL_STEPS, TrialBudget

GAIN = 1.05
"""A new plan must promise this much more than the present one."""
UNSURE = 0.04
"""More of it for a plan that was measured in one trial; less with the root of the trials."""
DRAFTING_MUST_GAIN = 1.03
"""Drafting must promise this much over plain steps.  Drafted requests end at different times and leave small batches behind,
the best of a dozen estimates is too good, and a drafter that does not pay can serve somebody else."""
DWELL_STEPS = 16
"""Steps a plan is kept for at least, unless the load changes."""
RECONSIDER_EVERY = 4
"""Steps between two looks at all plans, which take a few hundred microseconds."""
SETTLE_STEPS = 2
"""Steps after a change that still verify what the plan before asked for."""
LEARN_STEPS = DWELL_STEPS + SETTLE_STEPS
"""Steps after a change in which the new plan is measured.  From then on what it takes is the measure of the machine's speed, by
which all others are judged: only a trial between its steps tells which of two plans is the quicker."""
PROBE_EVERY = 16
"""Steps between two trials at least."""
PROMISING, UNTRIED, STALE_STEPS = 0.85, 0.8, 512
"""Share of the present plan's goodput that a plan must have to be tried again (estimated, where it never was tried at this
load), and steps until then."""
DOUBT, DOUBT_STEPS = 0.25, 64
"""How much better than it was measured in one trial a plan may be, and steps until it is measured again if it might beat the
present one: a moment when the machine was slow must not decide for long.  The doubt falls with the root of the trials."""
PLAIN_SHARE, PLAIN_STEPS = 0.6, 128
"""Plain steps are measured again after so many steps if they reach this share of the present plan: of them nothing is uncertain
but what they take, and they are the way out of all that does not pay."""
REVISIT_STEPS = 512
"""Steps without drafts after which drafting is tried whatever its estimate: acceptance is known only by drafting."""
LONGEST_REVISIT = 2048
"""The same after drafting was tried in vain again and again: each time in a row doubles the wait."""
CALL_STEPS = 8
"""Steps before a trial in which drafters that were not asked for long take in what was said meanwhile."""
LOOKUP_LEAD_STEPS = 24
"""Steps that prompt lookup needs after plain ones to read what was said meanwhile, and to learn what it is worth."""
LOOKUP_STEPS = 1024
"""Plain steps after which prompt lookup is tried again: it costs next to nothing, and text may begin to repeat itself."""


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

    calls_drafters: bool
    """Whether drafters should take in now what was not sent while nothing was drafted: they are about to be asked."""

    @property
    def settled(self) -> bool:
        """Whether what is verified now was drafted under the present plan."""
        ...

    def plan(self, requests: int) -> Plan:
        """For the next step, with `requests` requests decoding."""
        ...

    def stepped(self, requests: int, verified: int, step_s: float, cycle_s: float | None) -> None:
        """The step so planned verified `verified` of `requests` requests in `step_s` seconds, and ended `cycle_s` after the one
        before; None: the time between holds something else than this plan."""
        ...


class FixedPlanner:
    """The plan of a mode that was asked for."""

    settled = True
    calls_drafters = False

    def __init__(self, plan: Plan) -> None:
        self.decision: Decision | None = None
        self.changes = 0
        self._plan = plan

    def plan(self, requests: int) -> Plan:
        """Always the same."""
        return self._plan

    def stepped(self, requests: int, verified: int, step_s: float, cycle_s: float | None) -> None:
        """Nothing is to be learned."""


class AutoPlanner:
    """Chooses by goodput."""

    def __init__(self, costs: Costs, longest: int, outcomes: int, lookup: bool = False) -> None:
        """At most `longest` draft tokens and `outcomes` ahead; `lookup`: prompt lookup may draft by itself."""
        self.decision: Decision | None = None
        self.changes = 0
        self.calls_drafters = False
        self._costs = costs
        self._longest = longest
        self._outcomes = outcomes
        self._lookup = lookup
        self._plan: Plan | None = None
        self._load = (-1, True)
        """Half octave of the requests, and whether most of them are greedy."""
        self._steps = 0
        self._undrafted = 0
        self._revisit = REVISIT_STEPS
        self._since_trial = 0
        self._trial: Plan | None = None
        self._trial_left = 0
        self._budget = TrialBudget()
        self._running = OFF
        self._run = 0
        self._settling = SETTLE_STEPS
        self._clock = 0
        self._due = 0

    def plan(self, requests: int) -> Plan:
        """The present plan unless another one is clearly better, or a trial."""
        chosen = self._choose(requests) if requests else self._plan or OFF
        if chosen != self._running:
            self._settling = self._lead(chosen)
            self._running, self._run = chosen, 0
        self._run += 1
        return chosen

    @property
    def settled(self) -> bool:
        """See `Planner`."""
        return self._run > self._settling

    def stepped(self, requests: int, verified: int, step_s: float, cycle_s: float | None) -> None:
        """See `Planner`."""
        if cycle_s is not None and verified and self.settled:
            rest_s = max(cycle_s - step_s, 0.0) / verified
            in_force = self._running == self._plan and self._steps > LEARN_STEPS
            self._costs.cycles.observe(self._running, requests, step_s / verified, rest_s, self._clock, in_force=in_force)

    def _lead(self, plan: Plan) -> int:
        """Steps under `plan`, were it next, that say nothing of it."""
        return LOOKUP_LEAD_STEPS if plan.lookup and not self._running.k else SETTLE_STEPS

    def tokens_per_s(self, plan: Plan, requests: int) -> float:
        """Estimated goodput."""
        return self._costs.length(plan, requests) / self._costs.per_verification_s(plan, requests)

    def _worth(self, plan: Plan, requests: int) -> float:
        """What plans are compared by."""
        return self.tokens_per_s(plan, requests) / (DRAFTING_MUST_GAIN if plan.k else 1.0)

    def _choose(self, requests: int) -> Plan:
        self._clock += 1
        self._steps += 1
        load = place_of(requests), self._costs.mostly_greedy
        if load != self._load:
            # What is best here is not what was best there; but a load on the border of two must not flap.
            wait = SETTLE_STEPS if load[1] == self._load[1] else 0
            self._load, self._trial = load, None
            self._steps = max(self._steps, DWELL_STEPS - wait)
            self._due = self._clock + wait
        present = self._plan or OFF
        if self._plan is None or (self._clock >= self._due and self._steps >= DWELL_STEPS and self._trial is None):
            self._due = self._clock + RECONSIDER_EVERY
            present = self._reconsider(requests)
        self._undrafted = 0 if present.remote_k else self._undrafted + 1
        return self._try_out(present, requests)

    def _reconsider(self, requests: int) -> Plan:
        present = self._plan
        best = max(self._choices(requests), key=lambda plan: self._worth(plan, requests))
        if present is None:
            self._plan = best
        elif best != present and (
            present not in self._candidates(requests)
            or self._worth(best, requests) > self._must_gain(best, requests) * self._worth(present, requests)
        ):
            self._change(best, requests)
        return self._plan or OFF

    def _must_gain(self, plan: Plan, requests: int) -> float:
        """How many times the present plan's worth `plan` must promise: the less often it was measured, the more."""
        trials = self._costs.cycles.trials(plan, requests)
        return GAIN + (UNSURE / math.sqrt(trials) if trials else 0.0)

    def _choices(self, requests: int) -> list[Plan]:
        """The plans measured at this load; all of them where the present one was not."""
        candidates, cycles = self._candidates(requests), self._costs.cycles
        if self._plan not in candidates or cycles.at(self._plan, requests) is None:
            return candidates
        return [plan for plan in candidates if cycles.at(plan, requests) is not None]

    def _try_out(self, present: Plan, requests: int) -> Plan:
        """A plan worth trying in place of the present one, or the present one."""
        if self._trial is not None and self._trial_left > 0:
            self._trial_left -= 1
            self.calls_drafters = self._trial_left >= TRIAL_STEPS and self._trial.remote_k > 0
            return present if self.calls_drafters else self._trial
        if self._trial is not None:
            self._budget.spend(self._loss(self._trial, present, requests))
            self._trial = None
        self.calls_drafters = False
        self._budget.stepped()
        self._since_trial += 1
        if self._since_trial >= PROBE_EVERY and self._steps >= DWELL_STEPS:
            self._trial = self._worth_trying(present, requests)
            # Looking at all plans takes a few hundred microseconds: where nothing is due, not at every step.
            self._since_trial = 0 if self._trial is not None else PROBE_EVERY // 2
            if self._trial is not None:
                self._undrafted = 0 if self._trial.remote_k else self._undrafted
                self._trial_left = TRIAL_STEPS - SETTLE_STEPS + self._lead(self._trial)
                if self._trial.remote_k and not self._running.remote_k:
                    self._trial_left = TRIAL_STEPS + CALL_STEPS
                return self._try_out(present, requests)
        return present

    def _loss(self, trial: Plan, present: Plan, requests: int) -> float:
        """What a trial loses, in steps of the present plan, by what is known of both."""
        behind = 1 - self._worth(trial, requests) / self._worth(present, requests)
        longer = self._costs.per_verification_s(trial, requests) / self._costs.per_verification_s(present, requests)
        return TRIAL_STEPS * longer * max(behind, 0.0)

    def _worth_trying(self, present: Plan, requests: int) -> Plan | None:
        others = [plan for plan in self._candidates(requests) if plan != present]
        if self._undrafted >= self._revisit:
            self._undrafted, self._revisit = 0, min(2 * self._revisit, LONGEST_REVISIT)
            self._costs.fade()
            return max((p for p in others if p.remote_k), key=lambda plan: self._worth(plan, requests), default=None)
        if OFF in others and self._costs.cycles.at(OFF, requests) is None:
            # Plain steps are what drafting has to beat: what they take is worth knowing before anything else.
            return OFF
        present_rate = self._worth(present, requests)
        shares = {plan: self._worth(plan, requests) / present_rate for plan in others}
        due = [plan for plan in others if self._is_due(plan, shares[plan], requests)]
        if not due:
            return None
        best = max(due, key=lambda plan: shares[plan])
        return best if self._budget.affords(self._loss(best, present, requests)) else None

    def _is_due(self, plan: Plan, share: float, requests: int) -> bool:
        """Whether a plan with this share of the present one's estimated goodput is worth measuring (again)."""
        cycles = self._costs.cycles
        age, trials = cycles.age(plan, requests, self._clock), cycles.trials(plan, requests)
        if plan.lookup and self._plan == OFF:
            return age > LOOKUP_STEPS
        if trials and share * (1 + DOUBT / math.sqrt(trials)) > 1:
            return age > DOUBT_STEPS
        if plan == OFF and share > PLAIN_SHARE:
            return age > PLAIN_STEPS
        return share >= (PROMISING if trials else UNTRIED) and age > STALE_STEPS

    def _candidates(self, requests: int) -> list[Plan]:
        plans = [OFF]
        if self._lookup:
            plans.append(Plan(self._longest, lookup=True))
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
        if plan.remote_k:
            self._revisit = REVISIT_STEPS
        self.changes += 1
        share = requests / plan.groups
        self.decision = Decision(
            plan,
            requests,
            self.tokens_per_s(plan, requests),
            self.tokens_per_s(left, requests),
            costs.verify_s(share, plan.k),
            costs.draft_s(share, plan.k) if plan.remote_k else 0.0,
            costs.length(plan, requests),
            costs.ahead_hit_rate,
        )


def make_planner(mode: str, costs: Costs, k: int, outcomes: int, lookup: bool = False) -> Planner:
    """The planner of a remote draft mode."""
    if mode == "auto":
        return AutoPlanner(costs, k, outcomes, lookup)
    return FixedPlanner({"sync": Plan(k), "pipelined": Plan(k, groups=2), "ahead": Plan(k, outcomes=outcomes)}[mode])
