"""Learns, by temperature, how much of the shared noise a drafter should add.  Pure; drafter thread.

A draft token maximises `log q + tau G`.  If q were the target's own distribution, tau = 1 would always be right.  A head's q is
flatter or more peaked, so another tau may agree with the target more often.  Beside the tau in force, one other tau of a small
grid is tried on each draft's first token, in turn.  The text that follows shows which of them was right.
"""

from __future__ import annotations

from dataclasses import dataclass

GRID = (0.7, 0.85, 1.0, 1.15, 1.3)
START = GRID.index(1.0)
TRIES = 50
"""Comparisons of every tau before one is chosen.  With fewer, a rate is off by 0.07 (one standard error) or more."""
MEMORY = 0.999
"""Weight of a comparison after each newer one: about the last 1000 count."""
HOTTEST = 2.0
"""Temperatures above it share one entry; OpenAI's interface allows none above."""


@dataclass(frozen=True)
class Trial:
    """The token that each tried tau, by index in the grid, would draft at `base_len`."""

    base_len: int
    temperature: float
    tokens: dict[int, int]


class Taus:
    """Hits and tries of every tau, by temperature rounded to tenths."""

    def __init__(self) -> None:
        self._rates: dict[float, list[list[float]]] = {}
        self._in_force: dict[float, int] = {}
        self._turn = 0

    def in_force(self, temperature: float) -> int:
        """Index in the grid of the tau to draft with."""
        return self._in_force.get(_bucket(temperature), START)

    def rival(self, temperature: float) -> int:
        """Index in the grid of the tau to try beside it, this time."""
        others = [place for place in range(len(GRID)) if place != self.in_force(temperature)]
        self._turn += 1
        return others[self._turn % len(others)]

    def learn(self, trial: Trial, token: int) -> None:
        """Scores a trial: the text went on with `token`."""
        bucket = _bucket(trial.temperature)
        rates = self._rates.setdefault(bucket, [[0.0, 0.0] for _ in GRID])
        for place, drafted in trial.tokens.items():
            hits, tries = rates[place]
            rates[place] = [hits * MEMORY + (drafted == token), tries * MEMORY + 1.0]
        if all(tries >= TRIES for _, tries in rates):
            shares = [hits / tries for hits, tries in rates]
            present = self.in_force(bucket)
            best = max(range(len(GRID)), key=lambda place: (shares[place], place == present))
            self._in_force[bucket] = best


def _bucket(temperature: float) -> float:
    return round(min(temperature, HOTTEST), 1)
