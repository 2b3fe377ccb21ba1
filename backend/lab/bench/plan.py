"""Plans which configurations run, on which cores, and in which order they are measured.

Rounds alternate over the configurations (A B C, B C A, ...), so that other work of the machine affects all of them alike.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backend.config.settings import REMOTE_MODES
from backend.lab.bench.options import PROBABILISTIC
from backend.models.kinds import KINDS, DrafterKind


@dataclass(frozen=True)
class CoreSplit:
    """The cores of verifiers and of the drafter; a single core is shared."""

    verifier: tuple[int, ...]
    drafter: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted({*self.verifier, *self.drafter}))


@dataclass(frozen=True)
class Configuration:
    """One verifier process."""

    mode: str
    k: int
    """0: no drafting."""

    @property
    def label(self) -> str:
        """Mode and K: unique within a target, and a part of file names."""
        return self.mode + (f"-k{self.k}" if self.k else "")

    @property
    def served(self) -> str:
        return "native" if self.mode == PROBABILISTIC else self.mode

    @property
    def is_remote(self) -> bool:
        return self.mode in REMOTE_MODES


@dataclass(frozen=True)
class Point:
    """A kind of load, which every configuration is measured with."""

    concurrency: int
    temperature: float

    @property
    def name(self) -> str:
        """A short text for tables and messages."""
        return f"code c{self.concurrency} t{self.temperature:g}"


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    round: int
    point: Point
    configuration: Configuration


def split_cores() -> CoreSplit:
    """Splits the cores that this process may use: three quarters for verifiers, the rest for the drafter."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) == 1:
        return CoreSplit(cores, cores)
    verifying = len(cores) - max(1, len(cores) // 4)
    return CoreSplit(cores[:verifying], cores[verifying:])


def configurations(options: Namespace, kind: DrafterKind) -> list[Configuration]:
    """Everything measured for one target, plain decoding first.  Drafters without weights give no probabilities."""
    modes = [mode for mode in options.modes if mode != PROBABILISTIC or KINDS[kind].has_weights]
    return [Configuration(mode, k) for mode in modes for k in (options.ks if mode != "off" else (0,))]


def points(options: Namespace) -> list[Point]:
    """Every concurrency at every temperature."""
    return [Point(c, t) for c in options.concurrency for t in options.temperatures]


def cells(configured: Sequence[Configuration], at: Sequence[Point], rounds: int) -> Iterator[Cell]:
    """Every measurement in order: per round and point all configurations, each time starting with another one."""
    for number in range(rounds):
        for place, point in enumerate(at):
            first = (number + place) % len(configured)
            for configuration in (*configured[first:], *configured[:first]):
                yield Cell(number, point, configuration)
