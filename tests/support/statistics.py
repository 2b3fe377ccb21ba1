"""Tests whether tokens come from a given distribution.  Tests only."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

MIN_EXPECTED = 5.0


def chi_square(drawn: Sequence[Hashable], probabilities: Mapping[Any, float]) -> float:
    """The p-value of Pearson's test that `drawn` follows `probabilities`.

    Outcomes that are too rare for the test (Cochran's rule) share one bin.
    """
    counts, total = Counter(drawn), len(drawn)
    statistic, bins = 0.0, 0
    rare_observed, rare_expected = total, float(total)
    for outcome, probability in probabilities.items():
        expected = total * probability
        if expected >= MIN_EXPECTED:
            statistic += (counts[outcome] - expected) ** 2 / expected
            bins += 1
            rare_observed, rare_expected = rare_observed - counts[outcome], rare_expected - expected
    if rare_expected >= MIN_EXPECTED:
        statistic += (rare_observed - rare_expected) ** 2 / rare_expected
        bins += 1
    return chi_square_tail(statistic, bins - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic) for X chi-square distributed: the regularised upper incomplete gamma function Q(k/2, x/2)."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    tail = float(torch.special.gammaincc(half[0], half[1]))
    return tail if math.isfinite(tail) else 0.0
