"""How to draft in the next step: how many tokens, in how many micro-batches, and with how many outcomes enumerated ahead.

Pure; scheduler's process and thread.  The fixed modes have a fixed plan; `auto` compares predicted goodput (tokens per second)
of every plan it may choose, K = 0 included, and changes only when the gain is worth a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backend.verifier.costs import Costs
from backend.verifier.groups import SMALLEST

GAIN = 1.05
"""A new plan must promise this much more than the present one."""
DWELL_STEPS = 16
"""Steps a plan is kept for at least."""
PROBE_STEPS = 48
"""Steps without drafts after which one step drafts all the same, so that acceptance is known."""


@dataclass(frozen=True)
class Plan:
    """`k` draft tokens per request, verified in `groups` micro-batches, `outcomes` enumerated ahead per request."""

    k: int
    groups: int = 1
    outcomes: int = 0


OFF = Plan(0)


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

    def plan(self, requests: int) -> Plan:
        """For the next step, with `requests` requests decoding."""
        ...


class FixedPlanner:
    """The plan of a mode that was asked for."""

    def __init__(self, plan: Plan) -> None:
        self.decision: Decision | None = None
        self.changes = 0
        self._plan = plan

    def plan(self, requests: int) -> Plan:
        """Always the same."""
        return self._plan


class AutoPlanner:
    """Chooses by predicted goodput."""

    def __init__(self, costs: Costs, longest: int, outcomes: int) -> None:
        self.decision: Decision | None = None
        self.changes = 0
        self._costs = costs
        self._longest = longest
        self._outcomes = outcomes
        self._plan = Plan(longest)
        self._steps = 0
        self._undrafted = 0

    def plan(self, requests: int) -> Plan:
        """The present plan, unless another one is clearly better."""
        self._steps += 1
        if requests and self._steps >= DWELL_STEPS:
            best = max(self._candidates(requests), key=lambda plan: self.tokens_per_s(plan, requests))
            if self.tokens_per_s(best, requests) > GAIN * self.tokens_per_s(self._plan, requests):
                self._change(best, requests)
        self._undrafted = self._undrafted + 1 if self._plan.k == 0 else 0
        if self._undrafted >= PROBE_STEPS:
            self._undrafted = 0
            return Plan(self._longest)
        return self._plan

    def tokens_per_s(self, plan: Plan, requests: int) -> float:
        """Predicted goodput.

        With two groups one is verified while the other's drafts are made.  Ahead of time, a draft is waited for when its
        outcome was not among those enumerated.
        """
        costs, k = self._costs, plan.k
        if k == 0:
            return requests / costs.verify_s(requests, 0)
        tokens = requests * costs.length(k, ahead=bool(plan.outcomes))
        if plan.groups == 2 and requests >= 2 * SMALLEST:
            half = requests / 2
            return tokens / (2 * max(costs.verify_s(half, k), costs.draft_s(half, k)))
        draft_s = costs.draft_s(requests, k)
        if plan.outcomes:
            draft_s *= 1 - costs.ahead_hit_rate
        return tokens / (costs.verify_s(requests, k) + draft_s)

    def _candidates(self, requests: int) -> list[Plan]:
        plans = [OFF]
        for k in range(1, self._longest + 1):
            plans.append(Plan(k))
            plans.append(Plan(k, outcomes=self._outcomes))
            if requests >= 2 * SMALLEST:
                plans.append(Plan(k, groups=2))
        return plans

    def _change(self, plan: Plan, requests: int) -> None:
        present = self.tokens_per_s(self._plan, requests)
        self._plan, self._steps = plan, 0
        self.changes += 1
        share = requests / plan.groups
        self.decision = Decision(
            plan,
            requests,
            self.tokens_per_s(plan, requests),
            present,
            self._costs.verify_s(share, plan.k),
            self._costs.draft_s(share, plan.k),
            self._costs.length(plan.k, ahead=bool(plan.outcomes)),
            self._costs.ahead_hit_rate,
        )


def make_planner(mode: str, costs: Costs, k: int, outcomes: int) -> Planner:
    """The planner of a remote draft mode."""
    if mode == "auto":
        return AutoPlanner(costs, k, outcomes)
    return FixedPlanner({"sync": Plan(k), "pipelined": Plan(k, groups=2), "ahead": Plan(k, outcomes=outcomes)}[mode])
