"""Predicts what drafts will add to a step, from recent ones, and how often outcomes are foreseen.

Pure; scheduler's process and thread.  The survivals of recent drafts are put through the budget at the present load.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ROWS, FEWEST, RECENT_STEPS = 64, 8, 512
"""An outlook is made from at most 64 drafts of the last 512 steps; the newest 8 count however old they are."""
FORGET, PRIOR_HITS, PRIOR_LOOKS = 0.99, 0.75, 8.0
"""Weight of one look-up of an outcome after each newer one; share of hits assumed at first, so that it is tried, and its
weight."""
OCTAVES = 3
"""At first, up to 8 outcomes may be asked for."""

StepSeconds = Callable[[float, float], float]
"""Seconds of a step, by its tokens without drafts and its draft tokens (`step_times.StepTimes.at`)."""


@dataclass(frozen=True)
class Prospect:
    """What drafts are expected to add to a step, per request; entry j: cut after j tokens, 0 to K."""

    tokens: tuple[float, ...]
    """Draft tokens verified."""
    gains: tuple[float, ...]
    """Draft tokens accepted."""
    share: float = 1.0
    """Share of steps that verify any draft token."""

    def seconds(self, step_s: StepSeconds, requests: int, tokens: float) -> float:
        """Mean seconds of steps that verify `tokens` draft tokens per request on average.  A step's first one costs most."""
        share = self.share or 1.0
        verifying = step_s(requests, requests * tokens / share)
        return verifying if share == 1 else share * verifying + (1 - share) * step_s(requests, 0)


class Outlook:
    """Predicts what drafts would add to a step, from the survivals of recent drafts."""

    def __init__(self, k: int, prior: Sequence[float] = ()) -> None:
        """Drafts have at most `k` tokens.  `prior`: survivals assumed before the first draft."""
        self._k = k
        self._rows: deque[tuple[int, list[float]]] = deque(maxlen=ROWS)
        self._prior = list(prior[:k])

    def note(self, survivals: Sequence[float], step: int) -> None:
        """Takes the survivals of a draft, in step number `step`; empty if there was no draft.

        Tokens left out as unlikely are filled in: survivals go on falling by the last ratio.
        """
        row = list(survivals[: self._k])
        if row:
            falls = row[-1] / row[-2] if len(row) > 1 and row[-2] > 0 else row[-1]
            while len(row) < self._k:
                row.append(row[-1] * falls)
        self._rows.append((step, row))
        while len(self._rows) > FEWEST and self._rows[0][0] < step - RECENT_STEPS:
            self._rows.popleft()

    def prospect(self, requests: int, times: Sequence[float], every: int = 1) -> Prospect:
        """The prospect if all of `requests` requests had such drafts, in one step of `every`; `times` as in `spend`.

        Rows are dealt into steps of `requests` rows, and each step spends its budget.
        """
        rows = [row for _, row in self._rows] or [self._prior]
        rows = [rows[i % len(rows)] for i in range(max(-(-len(rows) // requests), 1) * requests)]
        survivals = np.array([row or [0.0] * self._k for row in rows])
        steps = survivals.reshape(-1, requests * self._k)
        order = np.argsort(-steps, axis=1, kind="stable")
        emitted = requests + np.cumsum(np.take_along_axis(steps, order, axis=1), axis=1)
        # As `spend` does, for all steps at once: the first of the best rates, if any beats that of no draft token.
        rates = emitted / np.array(times[1 : 1 + requests * self._k])
        taken = np.where(rates.max(axis=1) > requests / times[0], rates.argmax(axis=1) + 1, 0)
        spent = np.empty(steps.shape, bool)
        np.put_along_axis(spent, order, np.arange(requests * self._k) < taken[:, None], axis=1)
        verified = spent.reshape(-1, self._k)
        tokens, gains = (np.cumsum([0.0, *each.mean(axis=0) / every]).tolist() for each in (verified, verified * survivals))
        return Prospect(tuple(tokens), tuple(gains), float((taken > 0).mean()) / every)


class Foresight:
    """How often the actual outcome is among those drafted ahead, by their number and the tokens verified; decayed.

    A long verification has more outcomes, so fewer of them cover less.  Outcomes are counted by octaves: the first, the second,
    the next two, the next four, and so on.
    """

    def __init__(self, most: int, longest: int) -> None:
        """At most `most` outcomes are drafted per request, likeliest first; a draft has at most `longest` tokens."""
        self._octaves, self._looked_at = most.bit_length(), OCTAVES
        self._hits, self._looks = ([[0.0] * self._octaves for _ in range(longest + 1)] for _ in range(2))

    @property
    def choices(self) -> list[int]:
        """The numbers of outcomes that may be asked for: powers of two, up to twice as many as ever were."""
        return [1 << octave for octave in range(min(self._looked_at + 1, self._octaves))]

    def observe(self, rank: int | None, outcomes: int, tokens: int) -> None:
        """Of `outcomes` drafted in time for `tokens` tokens, the one at `rank` happened; None: none of them."""
        hits, looks, hit = self._hits[tokens], self._looks[tokens], None if rank is None else rank.bit_length()
        self._looked_at = max(self._looked_at, outcomes.bit_length())
        for octave in range(min(outcomes.bit_length(), self._octaves)):
            hits[octave] = FORGET * hits[octave] + (octave == hit)
            looks[octave] = FORGET * looks[octave] + 1

    def rate(self, outcomes: int, tokens: float) -> float:
        """Share of verifications of `tokens` draft tokens whose outcome is among the first `outcomes`."""
        below = min(int(tokens), len(self._hits) - 1)
        above = min(below + 1, len(self._hits) - 1)
        return self._rate(outcomes, below) + (tokens - below) * (self._rate(outcomes, above) - self._rate(outcomes, below))

    def _rate(self, outcomes: int, tokens: int) -> float:
        total, share = 0.0, PRIOR_HITS
        for hits, looks in zip(self._hits[tokens][: outcomes.bit_length()], self._looks[tokens], strict=False):
            # Before it is looked at, an octave is taken to be hit half as often as the one before: so it is tried if that pays.
            prior = PRIOR_LOOKS * (1 - looks * (1 - FORGET))
            share = (hits + prior * share / 2) / (looks + prior)
            total += share
        return min(1.0, total)
