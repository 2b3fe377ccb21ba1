"""Computes figures from answers: percentiles, rates, drift over time, and the comparison of two runs.  Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from loadtest.slo import DISTRIBUTIONS, PERCENTILES, figure
from loadtest.timing import Answer

Figures = dict[str, float | None]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value such that at least `percent` % of all values are not above it; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def samples(answers: Iterable[Answer]) -> dict[str, list[float]]:
    """The samples of every figure, in its unit, from the complete answers."""
    found: dict[str, list[float]] = {name: [] for name in DISTRIBUTIONS}
    for answer in answers:
        if answer.outcome != "ok":
            continue
        single = {
            "ttft": answer.ttft_s,
            "tpot": answer.tpot_s,
            "e2e": answer.ended - answer.started,
            "tgs": answer.tgs,
            "tgs_e2e": answer.tgs_e2e,
        }
        for name, value in single.items():
            if value is not None:
                found[name].append(value * 1000 if DISTRIBUTIONS[name] else value)
        found["inter_chunk"] += [gap * 1000 for gap in answer.gaps_s]
    return found


def summarize(answers: Sequence[Answer]) -> Figures:
    """Every figure that follows from answers alone.  Rates are over the time from the first start to the last end."""
    outcomes = Counter(answer.outcome for answer in answers)
    whole = [answer for answer in answers if answer.outcome == "ok"]
    wall_s = max((a.ended for a in answers), default=0.0) - min((a.started for a in answers), default=0.0)
    tokens = sum(answer.tokens for answer in whole)
    figures: Figures = {
        "requests": outcomes["ok"],
        "aborted": outcomes["aborted"],
        "rejected": outcomes["rejected"],
        "failures": outcomes["failed"],
        "prompt_tokens": sum(answer.prompt_tokens for answer in whole),
        "tokens": tokens,
        "wall_s": round(wall_s, 3),
        "requests_per_s": outcomes["ok"] / wall_s if wall_s > 0 else None,
        "tokens_per_s": tokens / wall_s if wall_s > 0 else None,
        "tgs_drift": drift(answers),
    }
    for name, values in samples(answers).items():
        figures |= {figure(name, percent): percentile(values, percent) for percent in PERCENTILES}
    return figures


def reasons(answers: Iterable[Answer]) -> dict[str, int]:
    """Number of failures by reason, most frequent first."""
    return dict(Counter(answer.reason for answer in answers if answer.outcome == "failed").most_common())


def by_label(answers: Sequence[Answer]) -> dict[str, Figures]:
    """The figures of each kind of request, in order of first appearance."""
    labels = list(dict.fromkeys(answer.label for answer in answers))
    return {label: summarize([answer for answer in answers if answer.label == label]) for label in labels}


def drift(answers: Sequence[Answer]) -> float | None:
    """Median TGS in the last third of the time / median TGS in the first third; below 1, the server became slower."""
    timed = [(answer.started, answer.tgs) for answer in answers if answer.outcome == "ok" and answer.tgs]
    if len(timed) < 6:
        return None
    first, last = min(at for at, _ in timed), max(at for at, _ in timed)
    third = (last - first) / 3
    early = [tgs for at, tgs in timed if at <= first + third]
    late = [tgs for at, tgs in timed if at >= last - third]
    return median(late) / median(early) if early and late else None


def compare(base: Sequence[Answer], other: Sequence[Answer]) -> Figures:
    """Compares `other` with `base` by pairs: answers to the same request of the same user in both runs.

    `speedup` is the median ratio of decode TGS within a pair, `speedup_e2e` the median ratio of whole times.  `identical` is
    the share of pairs with the same text: greedy answers do not depend on drafting.  Raises `ValueError` when there is no pair.
    """
    known = {(one.user, one.number, one.label): one for one in base if one.outcome == "ok"}
    paired = []
    for two in other:
        one = known.get((two.user, two.number, two.label))
        if one is not None and two.outcome == "ok" and one.tgs and two.tgs:
            paired.append((one, two, two.tgs / one.tgs))
    if not paired:
        raise ValueError("the two runs have no request in common")
    return {
        "pairs": len(paired),
        "speedup_p50": median(speed for _, _, speed in paired),
        "speedup_e2e_p50": median((one.ended - one.started) / (two.ended - two.started) for one, two, _ in paired),
        "identical": sum(one.text == two.text for one, two, _ in paired) / len(paired),
    }
