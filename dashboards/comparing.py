"""Compares quantities from a Prometheus with those from the records, over one period.  Reads files, queries Prometheus.

The period begins and ends while no request runs, so that both sources contain the same steps and requests.  Prometheus' figures
are differences of raw samples at the two ends, because `increase` would extrapolate.  Figures from both sources are quotients
of sums.  Differences below 2 % remain.  For figures of single requests (TGS), the gateway sees tokens a little later than the
verifier emits them.  Counters of time grow while idle, and a scrape shows them up to a quarter of a second late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from backend.fleet import IDLE_CAUSES
from backend.records.reading import Records, Selection, Worker
from backend.records.summary import request_speeds, summarise
from dashboards.scraping import Prometheus

TOLERANCE = 0.02
SMALLEST_SHARE = 0.001
"""Shares of time that differ by no more than this agree, even if their relative difference is large."""

_TOTALS = {
    "steps": "outrider_verifier_steps_total",
    "tokens": "outrider_verifier_tokens_total",
    "verifications": "outrider_verifier_verifications_total",
    "busy_s": "outrider_verifier_busy_seconds_total",
    "verify_s": "outrider_verifier_verify_seconds_total",
    "drafts": "outrider_drafts_total",
    "accepted": "outrider_accepted_tokens_total",
}
_BY_LABEL = {
    "idle_s": ("outrider_verifier_idle_seconds_total", "cause"),
    "drafts_by": ("outrider_drafts_total", "drafter"),
    "accepted_by": ("outrider_accepted_tokens_total", "drafter"),
}
_HISTOGRAMS = {"TGS decode": "outrider_tgs_decode", "TGS e2e": "outrider_tgs_e2e"}

Sums = dict[tuple[str, str], float]
"""By quantity and label; the label is empty for totals."""
Buckets = list[tuple[float, float]]
"""Pairs of upper bound and cumulative count, ascending; the last bound is infinite."""


class Quantity(NamedTuple):
    """One line of the comparison; None: the source has no such figure in this period."""

    name: str
    prometheus: float | None
    records: float | None
    is_share: bool = False

    @property
    def difference(self) -> float | None:
        """Prometheus' figure minus the records', as a share of the records'."""
        if self.prometheus is None or self.records is None:
            return None
        if self.prometheus == self.records:
            return 0.0
        return self.prometheus / self.records - 1 if self.records else math.inf

    @property
    def agrees(self) -> bool:
        """Whether the figures differ by at most `TOLERANCE`, or for shares of time by at most `SMALLEST_SHARE`."""
        if self.prometheus is None or self.records is None or self.difference is None:
            return self.prometheus is self.records
        near = self.is_share and abs(self.prometheus - self.records) <= SMALLEST_SHARE
        return near or abs(self.difference) <= TOLERANCE


def compare(prometheus: Prometheus, records: Path, since: float, until: float) -> list[Quantity]:
    """Compares all figures of the period; `since` and `until` are times of scrapes, in Unix seconds."""
    of_prometheus = _figures(_growth(prometheus, since, until))
    buckets = {name: _buckets(prometheus, metric, since, until) for name, metric in _HISTOGRAMS.items()}
    of_prometheus |= dict(_speeds_from_histograms(prometheus, buckets, since, until))
    workers = Records(records, Selection(since=since, until=until)).workers()
    of_records = _figures(_recorded(workers)) | dict(_speeds_from_requests(workers, buckets))
    names = [*of_records, *(name for name in of_prometheus if name not in of_records)]
    return [
        Quantity(name, of_prometheus.get(name), of_records.get(name), is_share=name.endswith("share"))
        for name in names
        if of_prometheus.get(name) is not None or of_records.get(name) is not None
    ]


def table(quantities: Sequence[Quantity]) -> list[str]:
    lines = [f"{'quantity':<38}{'Prometheus':>14}{'records':>14}{'difference':>13}"]
    for each in quantities:
        difference = "-" if each.difference is None else f"{100 * each.difference:+.2f} %"
        mark = "" if each.agrees else "  <- differs"
        lines.append(f"{each.name:<38}{_shown(each.prometheus):>14}{_shown(each.records):>14}{difference:>13}{mark}")
    return lines


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value == int(value) and value >= 10 else f"{value:.4f}"


# -- counters --------------------------------------------------------------------------------------------------------------


def _figures(sums: Sums) -> dict[str, float | None]:
    """Computes figures from sums, as the dashboards and the summary of records define them."""

    def length(drafts: float, accepted: float) -> float | None:
        return 1 + accepted / drafts if drafts else None

    found: dict[str, float | None] = {name: sums.get((name, ""), 0.0) for name in _TOTALS}
    found["acceptance length"] = length(found["drafts"] or 0.0, found["accepted"] or 0.0)
    for kind, drafter in sorted(sums):
        if kind == "drafts_by":
            drafts, accepted = sums[kind, drafter], sums.get(("accepted_by", drafter), 0.0)
            found[f"acceptance length, {drafter}"] = length(drafts, accepted)
    busy = sums.get(("busy_s", ""), 0.0)
    idle = {cause: sums.get(("idle_s", cause), 0.0) for cause in IDLE_CAUSES}
    wall = busy + sum(idle.values())
    found["busy + idle, s"] = wall
    if wall:
        found["busy share"] = busy / wall
        found |= {f"idle {cause} share": seconds / wall for cause, seconds in idle.items()}
        found["idle share"] = sum(idle.values()) / wall
        found["tokens per s"] = sums.get(("tokens", ""), 0.0) / wall
    return found


def _growth(prometheus: Prometheus, since: float, until: float) -> Sums:
    """Growth of the counters; a member that several gateways export counts once."""
    grown: Sums = {}
    for name, metric in _TOTALS.items():
        for _, value in _differences(prometheus, f"max by (verifier, drafter) ({metric})", since, until):
            grown[name, ""] = grown.get((name, ""), 0.0) + value
    for name, (metric, label) in _BY_LABEL.items():
        for labels, value in _differences(prometheus, f"max by (verifier, {label}) ({metric})", since, until):
            grown[name, labels[label]] = grown.get((name, labels[label]), 0.0) + value
    return grown


def _differences(prometheus: Prometheus, promql: str, since: float, until: float) -> Iterator[tuple[dict[str, str], float]]:
    before = {tuple(sorted(labels.items())): value for labels, value in prometheus.query(promql, since)}
    for labels, value in prometheus.query(promql, until):
        yield labels, value - before.get(tuple(sorted(labels.items())), 0.0)


def _recorded(workers: Sequence[Worker]) -> Sums:
    summary = summarise(workers)
    found: Sums = {
        (name, ""): sum(getattr(each, name) for each in summary.workers)
        for name in ("steps", "tokens", "verifications", "busy_s", "verify_s")
    }
    found |= {("drafts", ""): summary.live.drafts, ("accepted", ""): summary.live.accepted}
    found |= {("idle_s", cause): sum(each.idle_s[cause] for each in summary.workers) for cause in IDLE_CAUSES}
    for drafter, each in summary.by_drafter.items():
        found |= {("drafts_by", drafter): each.drafts, ("accepted_by", drafter): each.accepted}
    return found


# -- speeds of requests ----------------------------------------------------------------------------------------------------


def _buckets(prometheus: Prometheus, metric: str, since: float, until: float) -> Buckets:
    grown = _differences(prometheus, f"sum by (le) ({metric}_bucket)", since, until)
    return sorted((float(labels["le"]), value) for labels, value in grown)


def _speeds_from_histograms(
    prometheus: Prometheus, buckets: dict[str, Buckets], since: float, until: float
) -> Iterator[tuple[str, float | None]]:
    for name, metric in _HISTOGRAMS.items():
        count = sum(value for _, value in _differences(prometheus, f"sum({metric}_count)", since, until))
        total = sum(value for _, value in _differences(prometheus, f"sum({metric}_sum)", since, until))
        yield f"{name}, requests", count
        yield f"{name}, mean", total / count if count else None
        yield f"{name}, median (of buckets)", quantile(0.5, buckets[name])


def _speeds_from_requests(workers: Sequence[Worker], buckets: dict[str, Buckets]) -> Iterator[tuple[str, float | None]]:
    speeds: dict[str, list[float]] = {name: [] for name in _HISTOGRAMS}
    for worker in workers:
        for name, each in zip(_HISTOGRAMS, request_speeds(worker.requests), strict=True):
            speeds[name] += each.tolist()
    for name, values in speeds.items():
        counted = [(bound, float(sum(value <= bound for value in values))) for bound, _ in buckets[name]]
        yield f"{name}, requests", len(values)
        yield f"{name}, mean", sum(values) / len(values) if values else None
        yield f"{name}, median (of buckets)", quantile(0.5, counted)


def quantile(q: float, buckets: Buckets) -> float | None:
    """The quantile as Prometheus' `histogram_quantile` computes it, linear within its bucket; None without observations."""
    if not buckets or not buckets[-1][1]:
        return None
    rank, below, least = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            # The last bucket has no upper bound to interpolate to.
            return least if math.isinf(bound) else least + (bound - least) * (rank - below) / (count - below)
        below, least = count, bound
    raise AssertionError("the last bucket holds everything")
