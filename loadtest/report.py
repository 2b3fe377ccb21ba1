"""Figures from Locust's own statistics, and the summary of a run."""

from collections.abc import Mapping
from typing import Any

from locust.stats import RequestStats, StatsEntry

from loadtest.client import REJECTED
from loadtest.slo import CEILINGS, FLOORS, PERCENTILES, objective

ROWS = {"ttft_p{}_ms": "TTFT", "tpot_p{}_ms": "TPOT", "tgs_p{}": "TGS tok/s"}
"""Names of figures, and the kind of row in Locust's tables that they come from."""


def three_digits(value: float) -> float:
    """What Locust is to round to: by default it rounds to whole numbers, too coarse for TPOT."""
    return float(f"{value:.3g}")


def figures(stats: RequestStats) -> dict[str, float]:
    """Every figure that the clients measured, over all kinds of requests."""
    total = stats.total
    rejected = sum(each.occurrences for each in stats.errors.values() if str(each.error).startswith(REJECTED))
    whole = total.num_requests - total.num_failures
    found: dict[str, float] = {"requests": whole, "failures": total.num_failures - rejected, "rejected": rejected}
    rows = {name: _joined(stats, kind) for name, kind in ROWS.items()} | {"e2e_p{}_ms": total}
    for name, row in rows.items():
        if row.response_times:
            found |= {name.format(p): row.get_response_time_percentile(p / 100) for p in PERCENTILES}
    wall_s = (stats.last_request_timestamp or 0.0) - stats.start_time
    if wall_s > 0:
        tokens = _joined(stats, "tokens").total_response_time
        found |= {"requests_per_s": three_digits(whole / wall_s), "tokens_per_s": three_digits(tokens / wall_s)}
    return found


def _joined(stats: RequestStats, kind: str) -> StatsEntry:
    """The rows of a kind, for all labels together."""
    joined = StatsEntry(stats, "", kind)
    for row in stats.entries.values():
        if row.method == kind:
            joined.extend(row)
    return joined


def markdown(summary: Mapping[str, Any]) -> str:
    """`summary.json` as Markdown, also shown on the terminal."""
    figures, limits = summary["figures"], summary["slo"]
    lines = [f"## {summary['scenario']}: {'passed' if summary['passed'] else 'MISSED'}", ""]
    lines += [f"{summary['users']} users, {summary['duration_s']:g} s", "", "| figure | found | objective |", "|---|---|---|"]
    for name in (*FLOORS, *CEILINGS):
        if name in figures or name in limits:
            found = f"{figures[name]:g}" if name in figures else ""
            lines.append(f"| {name} | {found} | {objective(name, limits[name]) if name in limits else ''} |")
    return "\n".join([*lines, *(f"\nmissed: {line}" for line in summary["missed"])])
