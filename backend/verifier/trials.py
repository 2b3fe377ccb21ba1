"""What trying plans out may lose.  Pure; scheduler's process and thread.

A trial of a plan that turns out worse than the present one is lost time.  Losses are counted in steps of the present plan, and
all of them together stay a small share of all steps: where nothing pays but the present plan, trials become rare by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIAL_STEPS = 7
"""Steps of a trial."""
SHARE = 0.01
"""Of the steps that trials may lose."""
AT_START = 24.0
"""Steps that may be lost at once by a planner that knows nothing."""
MOST = 32.0
"""Steps that may be saved up."""


@dataclass
class TrialBudget:
    """Steps that may yet be lost; below zero when trials were worse than expected."""

    left: float = AT_START

    def stepped(self) -> None:
        """One step under the present plan."""
        self.left = min(self.left + SHARE, MOST)

    def affords(self, loss: float) -> bool:
        """Whether a trial that is expected to lose so much may be made now."""
        return self.left > loss

    def spend(self, loss: float) -> None:
        """What a trial did lose."""
        self.left -= loss
