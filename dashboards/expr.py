"""The PromQL that panels share.  Pure text; docs/metrics.md defines the figures.

Every gateway exports the whole fleet, so what members report is first reduced by `max` over gateways and only then summed.
"""

from __future__ import annotations

JOB = 'job=~"$job"'
VERIFIER = f'{JOB}, verifier=~"$verifier"'
PAIR = f'{VERIFIER}, drafter=~"$drafter"'
INTERVAL = "$__rate_interval"


def rate(metric: str, labels: str) -> str:
    """Per second, each series for itself."""
    return f"rate({metric}{{{labels}}}[{INTERVAL}])"


def once(value: str, *by: str) -> str:
    """One series per `by`, whichever gateways told it."""
    return f"max by (job, {', '.join(by)}) ({value})" if by else f"max by (job) ({value})"


def total(value: str, *by: str) -> str:
    """Summed by `by`, or over everything."""
    return f"sum by ({', '.join(by)}) ({value})" if by else f"sum({value})"


def pair_rate(metric: str, *extra: str, labels: str = PAIR) -> str:
    """A per-pair counter's rate, once per verifier and drafter."""
    return once(rate(metric, labels), "verifier", "drafter", *extra)


def verifier_rate(metric: str, *extra: str, labels: str = VERIFIER) -> str:
    """A per-verifier counter's rate, once per verifier."""
    return once(rate(metric, labels), "verifier", *extra)


def verifier_gauge(metric: str) -> str:
    """A per-verifier gauge, once per verifier."""
    return once(f"{metric}{{{VERIFIER}}}", "verifier")


def ratio(part: str, whole: str) -> str:
    """Nothing, and not NaN, where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def acceptance_length(*by: str) -> str:
    """1 + accepted / drafts, of the sums."""
    accepted = total(pair_rate("outrider_accepted_tokens_total"), *by)
    return f"1 + {ratio(accepted, total(pair_rate('outrider_drafts_total'), *by))}"


def quantile(q: float, histogram: str, *by: str) -> str:
    """Over all gateways; nothing without traffic."""
    buckets = rate(f"{histogram}_bucket", JOB)
    # Of no observations a quantile is NaN, which would draw as a point: drop it.
    return f"histogram_quantile({q}, sum by ({', '.join((*by, 'le'))}) ({buckets})) >= 0"


def or_zero(value: str) -> str:
    """0 where there is no series: a counter that nothing has happened to yet."""
    return f"(({value}) or on() vector(0))"


def pair_ratio(part: str, whole: str, *by: str, labels: tuple[str, ...] = ()) -> str:
    """Of two per-pair counters' rates; `labels` are those of the counters besides verifier and drafter."""
    return ratio(total(pair_rate(part, *labels), *by), total(pair_rate(whole, *labels), *by))
