"""What of a step's available drafts should pay, remembered until a draft or the step's size changes.  Pure."""

from collections.abc import Sequence

import numpy as np

from backend.speculation.budget import Spent, spend, spend_in_order
from backend.speculation.candidate import Candidate
from backend.speculation.step_times import StepTimes


class Ranking:
    """The budget of the next step, for each request's best draft."""

    def __init__(self, step_times: StepTimes) -> None:
        spend_in_order([[0.5]], spend([[0.5]], [1.0] * 3), [1.0] * 3)  # Compiles both.
        self._step_times = step_times
        self._of: tuple[int, list[Candidate | None], Sequence[int] | None] = (-1, [], None)
        """What `_expected` was computed for; no step has so few prompt tokens."""
        self._expected = self._cut = Spent([], 1.0, 0, 0.0, 0.0)
        self._is_cut, self._times = False, np.zeros(1)

    def forget(self) -> None:
        """The drafts of the next step are others, and step times may have changed."""
        self._of = -1, [], None

    def expected(self, candidates: list[Candidate | None], prefill: int = 0, limits: Sequence[int] | None = None) -> Spent:
        """How much of each draft should pay, by what any decision may read.

        `prefill`: the step's prompt tokens; `limits`: the most draft tokens of each request, None for any number.
        """
        if self._of != (prefill, candidates, limits):
            rows = _within(limits, [candidate.expected if candidate is not None else [] for candidate in candidates])
            self._times = self._step_times.row(max(len(rows), 1), sum(map(len, rows)) + 2, prefill)
            self._expected, self._is_cut = spend(rows, self._times), False
            self._of = prefill, candidates, limits
        return self._expected

    def cut(self, candidates: list[Candidate | None], prefill: int = 0, limits: Sequence[int] | None = None) -> Spent | None:
        """How much of each draft to verify, as in `expected`; None without drafts.

        Sampled ones are read in order (`spend_in_order`), and never beyond their limits: that would depend on a token that is
        not verified.
        """
        if not any(candidate is not None and candidate.expected for candidate in candidates):
            return None
        expected = self.expected(candidates, prefill, limits)
        if all(candidate is None or candidate.proposal is None for candidate in candidates):
            return expected
        if not self._is_cut:
            rows = _within(limits, [candidate.survivals if candidate is not None else [] for candidate in candidates])
            self._cut, self._is_cut = spend_in_order(rows, expected, self._times), True
        return self._cut

    def gain(self, spent: Spent | None) -> float:
        """How many more tokens per second a step that verifies `spent` promises than one without drafts, relative to these."""
        if spent is None or not spent.tokens:
            return 0.0
        requests = len(spent.lengths)
        return (requests + spent.gained) / spent.seconds * self._step_times.at(requests) / requests - 1


def _within(limits: Sequence[int] | None, rows: list[list[float]]) -> list[list[float]]:
    """`rows`, each cut to its limit."""
    return rows if limits is None else [row[:most] for row, most in zip(rows, limits, strict=True)]
