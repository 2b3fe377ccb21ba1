"""Reads `docker/` for tests: the Dockerfile's instructions by stage, .dockerignore's patterns, and merged compose files."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


@dataclass
class Stage:
    """One stage of a Dockerfile: a FROM and the instructions after it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == name]

    def last(self, name: str) -> str | None:
        found = self.all(name)
        return found[-1] if found else None


def stages(file: Path) -> dict[str, Stage]:
    """The stages by name; defaults of `ARG`s before the first `FROM` are filled in."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    defaults: dict[str, str] = {}
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, lines)):
        instruction, _, rest = line.partition(" ")
        rest = " ".join(rest.split())
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            base = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], base)
            current = found[name] = Stage(name, base)
        elif current is None:
            name, _, value = rest.partition("=")
            defaults[name] = value
        else:
            current.instructions.append((instruction, rest))
    return found


def inherited(all_stages: dict[str, Stage], name: str, instruction: str) -> str | None:
    """The last instruction of this name in a stage, or in the nearest stage that it builds on."""
    while name in all_stages:
        found = all_stages[name].last(instruction)
        if found is not None:
            return found
        name = all_stages[name].base
    return None


def exec_form(text: str) -> list[str]:
    """`["a", "b"]` as a list; raises for the shell form."""
    parsed = json.loads(text)
    assert isinstance(parsed, list)
    return [str(part) for part in parsed]


def copied(text: str) -> tuple[str | None, list[str], str]:
    """(stage, sources, destination) of a COPY."""
    words = shlex.split(text)
    stage = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
    paths = [word for word in words if not word.startswith("--")]
    return stage, paths[:-1], paths[-1]


def reaches_builder(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last pattern that matches the path or a parent directory decides."""
    kept = True
    parents = [str(Path(*Path(path).parts[:n])) for n in range(1, len(Path(path).parts) + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted, pattern = (True, pattern[1:]) if pattern.startswith("!") else (False, pattern)
        names = parents if not pattern.startswith("**/") else [Path(each).name for each in parents]
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names):
            kept = wanted
    return kept


def compose(*names: str) -> dict[str, Any]:
    """Merges compose files, later ones over earlier ones: mappings are merged, all other values replaced."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = _over(merged, yaml.safe_load((DOCKER / name).read_text()))
    return merged


def filled(value: Any, environment: dict[str, str]) -> Any:
    """Replaces `${NAME:-default}` and `${NAME:?message}`; raises `KeyError` for a missing required variable."""
    if isinstance(value, dict):
        return {key: filled(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, environment) for each in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, kind, rest = match[1], match[2], match[3]
        given = environment.get(name, "")
        if not given and kind == ":?":
            raise KeyError(f"{name}: {rest}")
        return given or rest

    return re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", replace, value)


def _over(low: Any, high: Any) -> Any:
    if isinstance(low, dict) and isinstance(high, dict):
        return {key: _over(low.get(key), high[key]) if key in high else low[key] for key in {**low, **high}}
    return high
