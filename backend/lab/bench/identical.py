"""Checks that all configurations generate the same greedy answers.  Pure."""

from collections.abc import Iterable

import msgspec

from backend.lab.bench.plan import Configuration, Point

PLAIN = "off"


class Difference(msgspec.Struct, frozen=True):
    """The first token in which a configuration differs from the reference, at one point."""

    target: str
    configuration: str
    point: str
    round: int
    request: int
    """Index among the measurement's prompts."""
    position: int
    """Index among the answer's tokens."""
    expected: int
    got: int
    reference: str


class GreedyCheck:
    """Collects greedy answers, and compares them with those of plain decoding (or the first configuration) to the same prompts.

    Another batch adds floats in another order, so near ties may be decided differently in any mode.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[str, Point, int], dict[Configuration, list[list[int]]]] = {}

    def add(self, target: str, configuration: Configuration, point: Point, number: int, answers: list[list[int]]) -> None:
        """Adds one measurement's token ids, in the order of its prompts; ignores answers that are not greedy."""
        if point.temperature == 0:
            self._answers.setdefault((target, point, number), {})[configuration] = answers

    @property
    def compared(self) -> int:
        """Number of answers that were compared with a reference."""
        return sum(len(answers) for each in self._answers.values() for answers in list(each.values())[1:])

    def differences(self) -> list[Difference]:
        """The first difference of every configuration at every point."""
        found = []
        for (target, point, number), each in self._answers.items():
            reference = next((c for c in each if c.mode == PLAIN), next(iter(each)))
            for configuration, answers in each.items():
                where = first_difference(each[reference], answers)
                if where is None:
                    continue
                found.append(Difference(target, configuration.label, point.name, number, *where, reference.label))
        return found


def first_difference(expected: Iterable[list[int]], got: Iterable[list[int]]) -> tuple[int, int, int, int] | None:
    """(request, position, expected token, other token) of the first difference; None when there is none."""
    for request, (one, other) in enumerate(zip(expected, got, strict=True)):
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return request, position, a, b
    return None
