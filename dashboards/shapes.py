"""Makes the common kinds of panel, each with one expression.  `options` are further fields of `Panel`.  Pure data."""

from __future__ import annotations

from typing import Any

from dashboards.expr import or_zero
from dashboards.model import Panel

NO_DRAFTS = "no drafts"
NO_TRAFFIC = "no traffic"


def plot(about: str, expr: str, legend: str = "{{verifier}}", **options: Any) -> Panel:
    """One expression over time; one line per verifier, unless `legend` names other labels."""
    return Panel(about, {legend: expr}, **options)


def share(about: str, expr: str, legend: str = "{{verifier}}", **options: Any) -> Panel:
    """A part of a whole, between 0 and 1."""
    return plot(about, expr, legend, unit="percentunit", high=1, **options)


def length(about: str, expr: str, legend: str, **options: Any) -> Panel:
    """An acceptance length, which is at least 1."""
    return plot(about, expr, legend, low=1, decimals=2, empty=NO_DRAFTS, **options)


def count(about: str, expr: str, legend: str = "{{verifier}}", **options: Any) -> Panel:
    return plot(about, expr, legend, decimals=0, **options)


def stacked(about: str, expr: str, *labels: str, unit: str = "ops", **options: Any) -> Panel:
    """Rates of events by these labels, stacked; 0 before the first event."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return plot(about, or_zero(expr), legend, unit=unit, stacked=True, **options)


def stat(about: str, expr: str, **options: Any) -> Panel:
    """One number, eight to a row."""
    return Panel(about, {"": expr}, kind="stat", width=3, height=4, **options)
