"""The files that the parent and Locust's process exchange: the plan of one run, and its answers.  Pure but for the files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.timing import Answer
from loadtest.workloads import Knobs

ANSWERS, HEALTH = "answers.jsonl", "health.json"
"""File names: the answers to all requests, and how well the load generator itself kept up."""


@dataclass(frozen=True)
class Plan:
    """One scenario against one gateway.  The API key is passed in the environment instead."""

    scenario: str
    host: str
    users: int
    timeout_s: float
    knobs: Knobs
    directory: str
    """The directory for `ANSWERS`, `HEALTH` and Locust's tables."""

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, file: Path) -> Plan:
        return msgspec.json.decode(file.read_bytes(), type=cls)


def write_answers(file: Path, answers: Iterable[Answer]) -> None:
    file.write_bytes(msgspec.json.Encoder().encode_lines(answers))


def read_answers(file: Path) -> list[Answer]:
    return msgspec.json.Decoder(Answer).decode_lines(file.read_bytes())
