"""Two samples of tokens: do they come from one distribution?  Tests only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import torch

MIN_EXPECTED = 5.0


def two_sample_chi_square(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """The p-value of Pearson's homogeneity test; outcomes too rare for it (Cochran's rule) share one bin."""
    counts = Counter(first), Counter(second)
    share = len(first) / (len(first) + len(second))
    bins: list[tuple[int, int]] = []
    rare = [0, 0]
    for outcome in set(counts[0]) | set(counts[1]):
        pair = counts[0][outcome], counts[1][outcome]
        if sum(pair) * min(share, 1 - share) < MIN_EXPECTED:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
        else:
            bins.append(pair)
    if sum(rare):
        bins.append((rare[0], rare[1]))
    statistic = 0.0
    for a, b in bins:
        for observed, expected in ((a, (a + b) * share), (b, (a + b) * (1 - share))):
            statistic += (observed - expected) ** 2 / expected if expected else 0.0
    return chi_square_tail(statistic, len(bins) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic) for X chi-square distributed: the regularised upper incomplete gamma function Q(k/2, x/2)."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    tail = float(torch.special.gammaincc(half[0], half[1]))
    return tail if math.isfinite(tail) else 0.0
