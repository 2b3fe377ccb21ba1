"""Checks that all configurations generate the same greedy answers.  Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from backend.lab.bench.plan import Configuration, Point

PLAIN = "off"
Answers = Mapping[tuple[str, Point, int], Mapping[Configuration, list[list[int]]]]
"""Greedy answers by target, point and round, and configuration: token ids, in the order of the prompts."""


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


def compared(answers: Answers) -> int:
    """Number of answers that are compared with a reference."""
    return sum(len(texts) for each in answers.values() for texts in list(each.values())[1:])


def differences(answers: Answers) -> list[Difference]:
    """The first difference of every configuration at every point from plain decoding, or else from the first configuration.

    Another batch adds floats in another order, so near ties may be decided differently in any mode.
    """
    found = []
    for (target, point, number), each in answers.items():
        reference = next((c for c in each if c.mode == PLAIN), next(iter(each)))
        for configuration, texts in each.items():
            if (where := first_difference(each[reference], texts)) is not None:
                found.append(Difference(target, configuration.label, point.name, number, *where, reference.label))
    return found


def first_difference(expected: Iterable[list[int]], got: Iterable[list[int]]) -> tuple[int, int, int, int] | None:
    """(request, position, expected token, other token) of the first difference; None when there is none."""
    for request, (one, other) in enumerate(zip(expected, got, strict=True)):
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return request, position, a, b
    return None
