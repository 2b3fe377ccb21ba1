"""Service level objectives: names of the figures, parsing of limits, and the limits that a run misses.  Pure.

Example: `ttft_p95_ms=2000,failures=0,tgs_p50=20`.  Limits on latencies and counts are upper limits, limits on rates lower ones.
A limit on a figure that the run did not produce counts as missed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

DISTRIBUTIONS = {"ttft": "ms", "inter_chunk": "ms", "tpot": "ms", "e2e": "ms", "tgs": "", "tgs_e2e": ""}
"""Figures that have percentiles, and their unit if it is part of the name."""

PERCENTILES = (50, 90, 95, 99)

COUNTS = ("failures", "rejected", "leftover")
"""Counts, which have upper limits."""

RATES = ("requests", "tokens_per_s", "requests_per_s", "tgs_drift", "acceptance_length", "identical", "speedup_p50")
"""Single figures with lower limits."""

DEFAULT: dict[str, float] = {"failures": 0, "rejected": 0, "leftover": 0, "requests": 1, "ttft_p95_ms": 5000, "tgs_p50": 5}
"""Default limits.  Two busy cores meet them; a server that hangs, loses requests or is far too slow does not."""


class SloError(ValueError):
    """The limits are malformed; the message is one line."""


@dataclass(frozen=True)
class Miss:
    """A limit that was missed."""

    name: str
    limit: float
    found: float | None

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name}: nothing was measured (limit {self.limit:g})"
        return f"{self.name}: {self.found:g} is {'below' if is_floor(self.name) else 'above'} the limit of {self.limit:g}"


def names() -> list[str]:
    """Every figure that can have a limit."""
    return [*(figure(name, p) for name in DISTRIBUTIONS for p in PERCENTILES), *COUNTS, *RATES]


def figure(name: str, percent: int) -> str:
    """The name of a percentile, such as `ttft_p95_ms`."""
    unit = DISTRIBUTIONS[name]
    return f"{name}_p{percent}{'_' + unit if unit else ''}"


def is_floor(name: str) -> bool:
    """Whether the figure's limit is a lower one."""
    return name in RATES or re.match(r"tgs(_e2e)?_p", name) is not None


def parse(text: str) -> dict[str, float]:
    """Parses `name=limit,name=limit`.  Raises `SloError`."""
    given: dict[str, float | str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise SloError(f"{part!r}: objectives are written as name=limit, separated by commas")
        given[name.strip()] = value.strip()
    return check(given)


def check(given: Mapping[str, object]) -> dict[str, float]:
    """Checks names and values of limits.  Raises `SloError`, for an unknown name with the nearest known one."""
    known = names()
    limits: dict[str, float] = {}
    for name, value in given.items():
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise SloError(f"there is no figure {name!r}{hint}")
        try:
            limits[name] = float(str(value))
        except ValueError:
            raise SloError(f"{name}: {value!r} is not a number") from None
    return limits


def misses(limits: Mapping[str, float], figures: Mapping[str, float | None]) -> list[Miss]:
    missed = []
    for name, limit in limits.items():
        found = figures.get(name)
        kept = found is not None and (found >= limit if is_floor(name) else found <= limit)
        if not kept:
            missed.append(Miss(name, limit, found))
    return missed
