"""What lies between two steps: waiting for drafts, and work meanwhile, but not a time without work."""

import pytest

from backend.engine.counting import CountingScheduler


def test_a_wait_and_the_work_meanwhile_lie_between_two_steps_and_a_rest_does_not() -> None:
    scheduler = CountingScheduler()
    stats, between = scheduler.counters.stats, []

    def step(seconds: float) -> None:
        scheduler.count_step(seconds, ran=True)
        between.append(scheduler._between_s)

    step(0.5)
    stats.busy_s += 0.25
    stats.idle_s["awaiting_draft"] += 1.0
    step(0.5)
    # An hour of ticks, each a little work.
    stats.busy_s += 60.0
    stats.idle_s["no_work"] += 3540.0
    scheduler.rested()
    step(0.5)
    stats.busy_s += 0.25
    step(0.5)
    assert between == pytest.approx([0.0, 1.25, 0.0, 0.25])
