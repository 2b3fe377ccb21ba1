"""Speculation as on a machine of which a step takes a second and a draft milliseconds, whatever else runs here.  Tests only.

What is verified, asked for and waited for follows from measured times.  With these, drafts always pay and are waited for as
long as the deadline allows, so tests can count them.  What is computed, and when messages come, is not touched.
"""

from backend.engine import build
from backend.speculation.deadlines import RoundTrip
from backend.speculation.speculator import Speculator
from backend.speculation.step_times import DraftTimes

STEP_S, TOKEN_S, PASS_S = 1.0, 1e-3, 1e-3


def keep_steady(token_s: float | None = None) -> None:
    """For the whole process.  `token_s`: another time per token."""
    stepped, observe = Speculator.stepped, DraftTimes.observe

    def steady_step(self: Speculator, base: int, drafted: int, seconds: float | None, between_s: float) -> None:
        stepped(self, base, drafted, seconds and STEP_S + (token_s or TOKEN_S) * (base + drafted), between_s)

    def steady_draft(self: DraftTimes, rows: int, k: int, computed_s: float, waited_s: float) -> None:
        observe(self, rows, k, PASS_S * (k + 1), PASS_S * (k + 1))

    Speculator.stepped = steady_step  # type: ignore[method-assign]
    DraftTimes.observe = steady_draft  # type: ignore[method-assign]
    # Nothing is to be measured.
    build.WARM_UP_BATCHES = (1,)  # type: ignore[assignment]
    RoundTrip.deadline_s = lambda self, longest_s: longest_s  # type: ignore[method-assign]
