"""What the rounds of `make bench-fleet` come to, as figures and as Markdown.  Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def summary(rounds: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> dict[str, Any]:
    """Medians of each way, and the ratios of rounds side by side to the fixed split's."""
    totals = {way: [r["tokens_per_s"] for r in rounds if r["way"] == way] for way in ways}
    result: dict[str, Any] = {"tokens_per_s": {w: _spread(each) for w, each in totals.items() if each}}
    for way in ways:
        ratios = [a / b for a, b in zip(totals[way], totals.get("static", ()), strict=False)]
        if way != "static" and ratios:
            result[f"{way}/static"] = _spread(ratios)
    # What leads into a round belongs to the way before it: pins coming and going.
    result["changes"] = {w: [r["changes"] + r["changes_measured"] for r in rounds if r["way"] == w] for w in ways}
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """A page for people."""
    about = result["about"]
    lines = [
        "# The assignment rule against a fixed split",
        "",
        f"Commit {about['commit']}, {about['date']}, {about['hardware']['cpu']}, {about['hardware']['machine_cores']} cores"
        f" (load average before: {about['hardware']['load_average_before']}). `{about['command']}`",
        "",
        f"Layout {result['layout']}: " + "; ".join(f"{name} on {cores}" for name, cores in result["cores"].items()) + ".",
        "Medians of rounds, least and greatest in brackets; ratios are of rounds side by side.",
        "",
        "| load | rule, tok/s | static, tok/s | ratio | changes per round of the rule | drafters at the end of it |",
        "|---|---|---|---|---|---|",
    ]
    for load, found in result["loads"].items():
        cells = [load, *(_shown(found["tokens_per_s"].get(way), "{:.0f}") for way in ("rule", "static"))]
        cells.append(_shown(found.get("rule/static"), "{:.2f}"))
        cells.append(", ".join(str(each) for each in found["changes"].get("rule", ())))
        last = [r["drafters"] for r in result["rounds"] if r["load"] == load and r["way"] == "rule"][-1:]
        cells.append("; ".join(f"{v}: {', '.join(d) or 'none'}" for v, d in last[0].items()) if last else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Over the whole run, pins included: {result['counters']['reassignments']} reassignments."]
    if result["steady"]:
        steady = result["steady"]
        lines.append(
            f"Steady load {steady['load']} under the rule for {steady['seconds']:g} s: {steady['changes_measured']} changes."
        )
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def _shown(spread: Mapping[str, float] | None, form: str) -> str:
    if spread is None:
        return ""
    median, least, greatest = (form.format(spread[name]) for name in ("median", "least", "greatest"))
    return f"{median} ({least}-{greatest})"
