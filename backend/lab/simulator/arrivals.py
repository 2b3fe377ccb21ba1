"""The input of a simulation: arrivals and lengths of requests, and members that fail or become slow.  Pure."""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

SPREAD = 0.6
"""Standard deviation of the logarithm of lengths; at 0.6, one response in a hundred has about four times the median length."""
COLUMNS = ("arrival_s", "prompt_tokens", "response_tokens")
EVENT = re.compile(r"(?P<member>[\w-]+)@(?P<at>[\d.]+)(\+(?P<seconds>[\d.]+))?(x(?P<factor>[\d.]+))?")


class TraceError(Exception):
    """A trace or an event is invalid; the message is one line."""


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at: float
    prompt: int
    response: int


@dataclass(frozen=True)
class Trouble:
    """A member fails (`factor` None) or becomes `factor` times as slow, from second `at` on, for `seconds`."""

    member: str
    at: float
    seconds: float
    factor: float | None = None


def poisson(rate: float, seconds: float, prompt: int, response: int, seed: int) -> list[Arrival]:
    """Independent arrivals, `rate` per second, with log-normal lengths of these means."""
    dice = random.Random(seed)
    arrivals: list[Arrival] = []
    at = 0.0
    while True:
        at += dice.expovariate(rate)
        if at >= seconds:
            return arrivals
        arrivals.append(Arrival(at, _length(dice, prompt), _length(dice, response)))


def _length(dice: random.Random, mean: int) -> int:
    return max(1, round(dice.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)))


def read(lines: Iterable[str]) -> list[Arrival]:
    """Arrivals in order of time, from CSV lines with the columns `COLUMNS`; rows may be in any order.  Raises `TraceError`."""
    rows = csv.DictReader(lines)
    if set(rows.fieldnames or ()) < set(COLUMNS):
        raise TraceError(f"a trace has the columns {', '.join(COLUMNS)}")
    arrivals = []
    for number, row in enumerate(rows, 2):
        try:
            arrival = Arrival(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["response_tokens"]))
        except (TypeError, ValueError) as error:
            raise TraceError(f"line {number} of the trace: {error}") from error
        if not (0 <= arrival.at < math.inf) or arrival.prompt < 1 or arrival.response < 1:
            raise TraceError(f"line {number} of the trace: times are not negative, lengths at least 1")
        arrivals.append(arrival)
    if not arrivals:
        raise TraceError("the trace has no rows")
    return sorted(arrivals, key=lambda each: each.at)


def trouble(text: str, is_slow: bool) -> Trouble:
    """Parses an event.  Raises `TraceError`.

    `d3@10+5`: drafter 3 fails at 10 s, for 5 s.  `v0@10+5x4`: verifier 0 is four times as slow at 10 s, for 5 s.
    """
    found = EVENT.fullmatch(text)
    if found is None or (found["factor"] is None) == is_slow:
        raise TraceError(f"{text!r}: expected MEMBER@AT[+SECONDS]{'xFACTOR' if is_slow else ''}")
    try:
        factor = float(found["factor"]) if is_slow else None
        event = Trouble(found["member"], float(found["at"]), float(found["seconds"] or math.inf), factor)
    except ValueError as error:
        raise TraceError(f"{text!r}: {error}") from error
    if factor is not None and factor <= 0:
        raise TraceError(f"{text!r}: a factor is greater than 0")
    return event
