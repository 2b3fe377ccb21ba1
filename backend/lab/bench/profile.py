"""`outrider bench --profile`: what our own code costs per engine step and per drafting round, beside vLLM's and the models'.

Parent process.  A remote mode is run at one request and at as many as asked; the fixed cost of a step and the cost of a request
in it are read off the two medians.  The children count with `stopwatch.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.config.settings import REMOTE_MODES
from backend.lab.bench.options import MODES
from backend.lab.bench.stopwatch import COMPUTE, THEIRS, WAIT
from backend.models.resolve import Say

NOT_OURS = (WAIT, THEIRS, COMPUTE)
PROFILED = tuple(mode for mode in MODES if mode in REMOTE_MODES)
Laps = Sequence[tuple[int, Mapping[str, float]]]


def medians_us(laps: Laps, requests: int) -> dict[str, float]:
    """Median microseconds by label over the laps of exactly so many requests, and `ours`: the median of their sums."""
    chosen = [times for count, times in laps if count == requests]
    if not chosen:
        return {}
    labels = sorted({label for times in chosen for label in times})
    found = {label: statistics.median(times.get(label, 0.0) for times in chosen) * 1e6 for label in labels}
    ours = [sum(seconds for label, seconds in times.items() if label not in NOT_OURS) for times in chosen]
    return found | {"ours": statistics.median(ours) * 1e6, "laps": float(len(chosen))}


def per_request_us(one: Mapping[str, float], many: Mapping[str, float], requests: int) -> tuple[float, float]:
    """Fixed cost of a lap and cost of each request in it, from the medians at one request and at `requests`."""
    slope = (many["ours"] - one["ours"]) / (requests - 1)
    return one["ours"] - slope, slope


def write(about: Mapping[str, Any], rows: Sequence[dict[str, Any]], output: Path, say: Say) -> None:
    """Says what was found and writes profile.json."""
    for row in rows:
        parts = ", ".join(f"{label} {us:.0f}" for label, us in row["us"].items() if label not in ("ours", "laps"))
        say(f"{row['mode']}, {row['process']}, {row['requests']} requests: ours {row['us']['ours']:.0f} us ({parts})")
        if "fixed_us" in row:
            say(f"  = {row['fixed_us']:.0f} us + {row['per_request_us']:.1f} us per request")
    content = {**about, "rows": list(rows)}
    (output / "profile.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {output}/profile.json")


def rows_of(mode: str, laps: Mapping[str, Mapping[int, Laps]]) -> list[dict[str, Any]]:
    """The figures of one mode: `laps` by process and by requests in flight."""
    rows: list[dict[str, Any]] = []
    for process, by_requests in laps.items():
        found = {requests: medians_us(each, requests) for requests, each in by_requests.items()}
        for requests, us in found.items():
            if not us:
                continue
            row: dict[str, Any] = {"mode": mode, "process": process, "requests": requests, "us": us}
            if requests > 1 and found.get(1):
                row["fixed_us"], row["per_request_us"] = per_request_us(found[1], us, requests)
            rows.append(row)
    return rows
