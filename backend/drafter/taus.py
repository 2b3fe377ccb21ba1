"""How much of the shared noise a drafter adds, learnt by temperature.  Pure; drafter thread.

A draft token maximises `log q + tau G`.  Were q the target's own distribution, tau = 1 would always be right.  A head's is
flatter or more peaked, and then another tau agrees with the target more often.  So beside the tau in force one other of a small
grid says what it would draft, in turn; the text that follows shows which of them was right.
"""

from __future__ import annotations

from dataclasses import dataclass

GRID = (0.7, 0.85, 1.0, 1.15, 1.3)
START = GRID.index(1.0)
TRIES = 50
"""Comparisons before a tau counts: with fewer its rate is off by 0.07 (one standard error) or more."""
MEMORY = 0.999
"""What a hit is worth at the next one: some 1000 count."""
HOTTEST = 2.0
"""Temperatures above it share a place; OpenAI's interface allows none."""


@dataclass(frozen=True)
class Trial:
    """What each tried tau, by its place in the grid, drafts at `base_len`."""

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
        """The place in the grid of the tau to draft with."""
        return self._in_force.get(_bucket(temperature), START)

    def rival(self, temperature: float) -> int:
        """The one to compare it with now."""
        others = [place for place in range(len(GRID)) if place != self.in_force(temperature)]
        self._turn += 1
        return others[self._turn % len(others)]

    def learn(self, trial: Trial, token: int) -> None:
        """The text went on with `token`."""
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
