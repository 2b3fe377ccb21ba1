"""Builds the PromQL that panels share.  Pure text; docs/metrics.md defines the figures.

Every gateway exports the whole fleet, so figures of members are first reduced by `max` over gateways and only then summed.
"""

from __future__ import annotations

JOB = 'job=~"$job"'
VERIFIER = f'{JOB}, verifier=~"$verifier"'
DRAFTER = f'{JOB}, drafter=~"$drafter"'
PAIR = f'{VERIFIER}, drafter=~"$drafter"'
INTERVAL = "$__rate_interval"


def rate(metric: str, labels: str) -> str:
    """The rate of each series, per second."""
    return f"rate({metric}{{{labels}}}[{INTERVAL}])"


def once(value: str, *by: str) -> str:
    """One series per value of the labels `by`, even if several gateways export it."""
    return f"max by (job, {', '.join(by)}) ({value})" if by else f"max by (job) ({value})"


def total(value: str, *by: str) -> str:
    """The sum by the labels `by`, or over everything."""
    return f"sum by ({', '.join(by)}) ({value})" if by else f"sum({value})"


def pair_rate(metric: str, *extra: str, labels: str = PAIR) -> str:
    """The rate of a counter of pairs, one series per verifier and drafter."""
    return once(rate(metric, labels), "verifier", "drafter", *extra)


def verifier_rate(metric: str, *extra: str, labels: str = VERIFIER) -> str:
    """The rate of a counter of verifiers, one series per verifier."""
    return once(rate(metric, labels), "verifier", *extra)


def verifier_gauge(metric: str) -> str:
    """A gauge of verifiers, one series per verifier."""
    return once(f"{metric}{{{VERIFIER}}}", "verifier")


def drafter_rate(metric: str) -> str:
    """A per-drafter counter's rate, once per drafter."""
    return once(rate(metric, DRAFTER), "drafter")


def drafter_gauge(metric: str, *by: str) -> str:
    """A per-drafter gauge, once per drafter."""
    return once(f"{metric}{{{DRAFTER}}}", "drafter", *by)


def ratio(part: str, whole: str) -> str:
    """`part / whole`; no value, rather than NaN, where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def acceptance_length(*by: str) -> str:
    """1 + accepted draft tokens / drafts, from sums by the labels `by`."""
    accepted = total(pair_rate("outrider_accepted_tokens_total"), *by)
    return f"1 + {ratio(accepted, total(pair_rate('outrider_drafts_total'), *by))}"


def quantile(q: float, histogram: str, *by: str) -> str:
    """A quantile over all gateways; no value without traffic."""
    buckets = rate(f"{histogram}_bucket", JOB)
    # Without observations a quantile is NaN, which Grafana would draw as a point; the comparison removes it.
    return f"histogram_quantile({q}, sum by ({', '.join((*by, 'le'))}) ({buckets})) >= 0"


def or_zero(value: str) -> str:
    """0 where there is no series: a counter is exported only after its first count."""
    return f"(({value}) or on() vector(0))"


def pair_ratio(part: str, whole: str, *by: str, labels: tuple[str, ...] = ()) -> str:
    """The ratio of the rates of two counters of pairs; `labels` are the counters' labels besides verifier and drafter."""
    return ratio(total(pair_rate(part, *labels), *by), total(pair_rate(whole, *labels), *by))
