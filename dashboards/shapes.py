"""The panels that recur: most have one expression.  `options` are the fields of `Panel`.  Pure data."""

from __future__ import annotations

from typing import Any

from dashboards.expr import or_zero
from dashboards.model import Panel, Query


def plot(title: str, about: str, expr: str, legend: str, **options: Any) -> Panel:
    """One expression over time."""
    return Panel(title, about, [Query(expr, legend)], **options)


def by_verifier(title: str, about: str, expr: str, **options: Any) -> Panel:
    """One line per verifier."""
    return plot(title, about, expr, "{{verifier}}", **options)


def stacked(title: str, about: str, expr: str, *labels: str, unit: str = "ops", **options: Any) -> Panel:
    """What happens, by these labels, one on top of the other; 0 where nothing has happened yet."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return plot(title, about, or_zero(expr), legend, unit=unit, stacked=True, **options)


def stat(title: str, about: str, expr: str, **options: Any) -> Panel:
    """One number, eight to a row."""
    return Panel(title, about, [Query(expr)], kind="stat", width=3, height=4, **options)
