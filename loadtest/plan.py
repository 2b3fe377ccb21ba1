"""What one run is to do, as the file that the parent writes and Locust's process reads.  Pure but for the files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from loadtest.timing import Answer
from loadtest.workloads import Knobs

ANSWERS, HEALTH = "answers.jsonl", "health.json"
"""What came of every request; how well the load generator itself kept up."""


@dataclass(frozen=True)
class Plan:
    """One scenario against one gateway.  The key is not in it: it travels in the environment."""

    scenario: str
    host: str
    users: int
    rate: float | None
    timeout_s: float
    knobs: Knobs
    directory: str
    """Where to write `ANSWERS`, `HEALTH` and Locust's tables."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Plan:
        """Raises `OSError`, `ValueError` or `TypeError` for what is no plan."""
        tree = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**tree, "knobs": Knobs(**tree["knobs"])})


def write_answers(file: Path, answers: Iterable[Answer]) -> None:
    """One JSON object per line."""
    with file.open("w", encoding="utf-8") as lines:
        for answer in answers:
            lines.write(json.dumps(asdict(answer)) + "\n")


def read_answers(file: Path) -> list[Answer]:
    """What `write_answers` wrote."""
    known = {field.name for field in fields(Answer)}
    with file.open(encoding="utf-8") as lines:
        return [Answer(**{name: value for name, value in json.loads(line).items() if name in known}) for line in lines]
