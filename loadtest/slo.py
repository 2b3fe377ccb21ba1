"""Service level objectives: names of the figures, parsing of limits, and the limits that a run misses.  Pure.

Example: `ttft_p95_ms=2000,failures=0,tgs_p50=20`.  Limits on latencies and counts are upper limits, limits on rates lower ones.
A limit on a figure that the run did not produce counts as missed.
"""

import difflib
from argparse import ArgumentTypeError
from collections.abc import Mapping

PERCENTILES = (50, 90, 95, 99)
LATENCIES = [f"{name}_p{percent}_ms" for name in ("ttft", "tpot", "e2e") for percent in PERCENTILES]
CEILINGS = ["failures", "rejected", "leftover", *LATENCIES]
"""Figures with upper limits."""
FLOORS = ["requests", "requests_per_s", "tokens_per_s", "acceptance_length", *(f"tgs_p{percent}" for percent in PERCENTILES)]
"""Figures with lower limits."""

DEFAULT: dict[str, float] = {"failures": 0, "rejected": 0, "leftover": 0, "requests": 1, "ttft_p95_ms": 5000, "tgs_p50": 5}
"""Default limits.  Two busy cores meet them; a server that hangs, loses requests or is far too slow does not."""


def limits(text: str) -> dict[str, float]:
    """Parses `name=limit,name=limit`.  Raises `ArgumentTypeError` for an unknown name, `ValueError` for what is no number."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = (each.strip() for each in part.partition("="))
        if name not in CEILINGS + FLOORS:
            nearest = difflib.get_close_matches(name, CEILINGS + FLOORS, n=1, cutoff=0)
            raise ArgumentTypeError(f"there is no figure {name!r}; did you mean {nearest[0]}?")
        found[name] = float(limit)
    return found


def misses(limits: Mapping[str, float], figures: Mapping[str, float]) -> list[str]:
    """A line for each limit that is missed."""
    missed = []
    for name, limit in limits.items():
        found = figures.get(name)
        if found is None:
            missed.append(f"{name}: nothing was measured (limit {limit:g})")
        elif found < limit if name in FLOORS else found > limit:
            missed.append(f"{name}: {found:g} is {'below' if name in FLOORS else 'above'} the limit of {limit:g}")
    return missed
