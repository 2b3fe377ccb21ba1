"""The scenarios by name: the workload, the number of users over time, and special objectives of each.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from loadtest import workloads


class Stage(NamedTuple):
    """A period of the load with a constant number of users."""

    until_s: float
    users: int


Stages = Callable[[int, float], list[Stage]]
"""(users, duration in s) -> the stages, in order of time."""


def constant(users: int, duration_s: float) -> list[Stage]:
    """One number of users throughout."""
    return [Stage(duration_s, users)]


def burst(users: int, duration_s: float) -> list[Stage]:
    """Three times one user, then all users, each for a sixth of the time."""
    sixth = duration_s / 6
    return [Stage(sixth * (step + 1), 1 if step % 2 == 0 else users) for step in range(6)]


def ramp(users: int, duration_s: float) -> list[Stage]:
    """More users step by step, up to all of them, in at most eight steps of equal length."""
    steps = min(users, 8)
    return [Stage(duration_s * (step + 1) / steps, max(1, round(users * (step + 1) / steps))) for step in range(steps)]


def users_at(stages: list[Stage], elapsed_s: float) -> int | None:
    """Number of users at this time; None: the load is over."""
    return next((stage.users for stage in stages if elapsed_s < stage.until_s), None)


@dataclass(frozen=True)
class Scenario:
    """One way to load a gateway."""

    summary: str
    make: workloads.Make
    users: int = 4
    duration_s: float = 30.0
    stages: Stages = constant
    kills_drafter: bool = False
    compares: bool = False
    """Whether the scenario runs twice, first on a fleet without speculation, and is compared by pairs of requests."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Objectives in addition to `slo.DEFAULT`."""


SCENARIOS: dict[str, Scenario] = {
    "chat": Scenario("chat completions, streamed", workloads.chat),
    "completion": Scenario("completions, streamed", workloads.completion),
    "mixed": Scenario("both endpoints, short and long prompts and answers", workloads.mixed),
    "multiturn": Scenario("conversations of four turns behind one shared system prompt", workloads.multiturn),
    "domain-shift": Scenario("code for the first half of the time, then prose", workloads.domain_shift),
    "burst": Scenario("one user, and all of them in bursts", workloads.completion, users=16, stages=burst),
    "ramp": Scenario("more users step by step", workloads.completion, users=16, duration_s=60.0, stages=ramp),
    "soak": Scenario(
        "mixed lengths for a long time; speed must not decay", workloads.mixed, duration_s=600.0, slo={"tgs_drift": 0.7}
    ),
    "aborts": Scenario("clients leave in the middle of every other stream", workloads.aborts),
    "bad-input": Scenario("two of three requests are wrong and get a clean 4xx", workloads.bad_input),
    "fault": Scenario(
        "a drafter is killed after a third of the time; no request may notice", workloads.completion, kills_drafter=True
    ),
    "compare": Scenario(
        "the same requests without and with speculation, compared pair by pair",
        workloads.completion,
        compares=True,
        slo={"identical": 0.95},
    ),
}
