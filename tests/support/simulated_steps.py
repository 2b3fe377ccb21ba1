"""A verifier's steps under a planner, simulated: what plans really cost differs from what the parts suggest, and is noisy."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from backend.verifier.costs import Costs, Source
from backend.verifier.cycles import Plan
from backend.verifier.planner import Planner

HICCUP_MS = 20.0
SLOWER = 1.45
SLOW_STEPS = (5, 25)
"""Steps of a slow moment, at least and at most."""
DRIFT_STEPS = 32


@dataclass(frozen=True)
class Machine:
    """Times in ms.  A step costs `step + token * tokens`, a draft `draft + pass_ * (k + 1) + row * requests`."""

    step: float = 6.0
    token: float = 0.15
    draft: float = 0.5
    pass_: float = 0.3
    row: float = 0.05
    accept: float = 0.85
    hits: float = 0.8
    ahead_loss: float = 0.04
    """Share of verifications that go without a draft while outcomes are drafted ahead."""
    enumeration: float = 1.0
    """What a miss waits, on top of its draft, for the enumeration that goes on."""
    noise: float = 0.1
    hiccups: float = 0.01
    found: float = 0.0
    """Share of verifications that prompt lookup finds a draft for."""
    found_accept: float = 0.9
    slow_moments: float = 0.0
    """Chance per step that a moment begins in which everything takes `SLOWER` times as long."""
    drift: float = 0.0
    """Deviation of the machine's speed, which wanders and comes back within `DRIFT_STEPS`."""

    def verify_ms(self, requests: float, k: int) -> float:
        return self.step + self.token * requests * (k + 1)

    def draft_ms(self, requests: float, k: int) -> float:
        return self.draft + self.pass_ * (k + 1) + self.row * requests

    def cycle_ms(self, plan: Plan, requests: int) -> float:
        """From the end of a step to the end of the next."""
        if plan.k == 0:
            return self.verify_ms(requests, 0)
        if plan.lookup:
            return self.verify_ms(requests, 0) + self.token * requests * self.found * plan.k + 0.01 * requests
        if plan.groups == 2:
            half = requests / 2
            return max(self.verify_ms(half, plan.k), self.draft_ms(half, plan.k)) + 0.3
        if plan.outcomes:
            waits = 1 - self.hits**requests if requests <= 2 else 0.3
            return self.verify_ms(requests, plan.k) + waits * (self.draft_ms(requests, plan.k) + self.enumeration)
        return self.verify_ms(requests, plan.k) + self.draft_ms(requests, plan.k)

    def goodput(self, plan: Plan, requests: int) -> float:
        """Tokens per ms that a plan really brings."""
        bare = 1 - self.found if plan.lookup else self.ahead_loss if plan.outcomes else 0.0
        accept = self.found_accept if plan.lookup else self.accept
        length = bare + (1 - bare) * sum(accept**i for i in range(plan.k + 1))
        share = requests / 2 if plan.groups == 2 else requests
        return share * length / (self.cycle_ms(plan, requests) + HICCUP_MS * self.hiccups)

    def best(self, plans: list[Plan], requests: int) -> float:
        """Of all plans."""
        return max(self.goodput(plan, requests) for plan in plans)


def all_plans(requests: int, longest: int = 4, outcomes: int = 8, *, lookup: bool = False) -> list[Plan]:
    """Every plan of a fixed mode, and prompt lookup alone."""
    plans = [Plan(0), Plan(longest, lookup=True)] if lookup else [Plan(0)]
    for k in range(1, longest + 1):
        plans += [Plan(k), Plan(k, outcomes=outcomes)]
        plans += [Plan(k, groups=2)] if requests >= 4 else []
    return plans


def run(
    machine: Machine,
    planner: Planner,
    costs: Costs,
    requests: int,
    steps: int,
    dice: random.Random,
    plans: list[Plan] | None = None,
) -> float:
    """Tokens per ms over `steps` steps; what happens is told to the planner and the costs as the scheduler does it.

    `plans` gets what was in force in each.
    """
    tokens = spent = 0.0
    before = Plan(0)
    slow_left = 0
    wandered = 0.0
    for number in range(steps):
        plan = planner.plan(requests)
        if plans is not None:
            plans.append(plan)
        verified = requests // 2 if plan.groups == 2 and requests >= 4 else requests
        if machine.slow_moments and not slow_left and dice.random() < machine.slow_moments:
            slow_left = dice.randint(*SLOW_STEPS)
        slow = max(dice.gauss(1.0, machine.noise), 0.5) * (SLOWER if slow_left else 1.0)
        slow_left = max(slow_left - 1, 0)
        if machine.drift:
            wandered += -wandered / DRIFT_STEPS + dice.gauss(0.0, machine.drift * math.sqrt(2 / DRIFT_STEPS))
            slow *= math.exp(wandered)
        took = machine.cycle_ms(plan, requests) * slow
        if dice.random() < machine.hiccups:
            took += HICCUP_MS
        for _ in range(verified):
            bare = 1 - machine.found if before.lookup else machine.ahead_loss if before.outcomes else 0.0
            drafted = 0 if bare and dice.random() < bare else before.k
            accepted, accept = 0, machine.found_accept if before.lookup else machine.accept
            while accepted < drafted and dice.random() < accept:
                accepted += 1
            tokens += accepted + 1
            if before.k and planner.settled:
                hit = bool(before.outcomes) and dice.random() < machine.hits
                source: Source = "own" if before.lookup else "ahead" if hit else "features"
                costs.note_verification(before, requests, True, source, drafted, accepted)
        spent += took
        verify_s = machine.verify_ms(verified, before.k) / 1000
        costs.verify.observe(verified * (before.k + 1), verify_s)
        if plan.k and machine.found:
            # What lookups would bring is seen whenever something is drafted.
            kept = sum(machine.found_accept**i for i in range(1, plan.k + 1))
            costs.lookups = machine.found, 1 + machine.found * kept
        if plan.remote_k:
            costs.note_drafts(verified, plan.k, machine.draft_ms(verified, plan.k) / 1000, None)
        step_ms = machine.verify_ms(verified, plan.k) * slow
        planner.stepped(requests, verified, min(step_ms, took) / 1000, None if number == 0 else took / 1000)
        before = plan
    return tokens / spent


def profiled(machine: Machine) -> Costs:
    """What a verifier knows after its warm-up: plain steps of a few sizes."""
    costs = Costs()
    for batch in (1, 4, 16, 64):
        costs.verify.observe(batch, machine.verify_ms(batch, 0) / 1000)
    return costs
