"""`outrider train-drafter`: trains a head for a model from a file of prompts.  The command line's process.

A fleet with `--drafter grow` generates answers to the prompts, and its drafter learns from them as from live traffic
(`backend/learning/`).  No prompts are sent while the trainer is behind.  The result is in `--output`; a further run with the
same directory goes on from there.
"""

import argparse
import asyncio
import csv
import random
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

from backend.config import environment
from backend.config.sources import CommandError, ConfigError, KeyPath, Loaded, Parser, Say, at_least, load
from backend.rollout.trace import TraceError, read_json_lines, read_prompts
from outrider.asynchronous import AsyncFleet, Prompt
from outrider.types import OutriderError

OWN: tuple[KeyPath, ...] = (("drafting", "learning_dir"), ("drafting", "learning"))
"""Settings that this command sets itself and nobody may give."""
TEMPERATURES = (0.0, 0.8)
"""Temperatures of answers, drawn at random: the head must draft for greedy and sampled requests."""
AT_A_TIME = 16
"""Requests at a time: as many as a drafter records."""
MOST_OWED = 50_000
"""Rows waiting for the trainer above which no prompts are sent."""
REFUSED = (400, 413, 422)
"""HTTP statuses of prompts that can never be answered: too long, or no tokens of this model."""
WAIT_S, REPORT_S = 1.0, 10.0
CURVE = "curve.csv"
COLUMNS = ("seconds", "steps", "sequences", "loss", "candidate_length", "present_length", "version")


def main(arguments: Sequence[str], say: Say) -> None:
    """Raises `ConfigError` or `CommandError`."""
    parser = Parser(
        prog="outrider train-drafter",
        description="Trains an EAGLE-3 head for --model on answers to prompts; run again, it goes on.",
        epilog="Further arguments are settings, as of `outrider serve`: --model, --drafter (grow, or a head that learned), ...",
        allow_abbrev=False,
    )
    parser.add_argument("--data", type=Path, required=True, help="prompts: JSON Lines with `prompt` or `messages`, or a trace")
    parser.add_argument("--output", type=Path, required=True, help="directory of versions, curve and what it takes to go on")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to train in all (default: 30)")
    parser.add_argument("--steps", type=at_least(1), help="train for so many steps instead")
    parser.add_argument("--max-tokens", type=at_least(32), default=256, help="of an answer (default: 256)")
    given, rest = parser.parse_known_args(arguments)
    if given.minutes <= 0:
        raise ConfigError("--minutes: must be more than 0")
    loaded = load(rest, "outrider train-drafter")
    for path in OWN:
        if path in loaded.origins:
            raise ConfigError(f"{loaded.origins[path]}: is not for this command")
    prompts = read_data(given.data)
    environment.drop_outrider_variables()
    try:
        asyncio.run(train(given, fleet_settings(loaded, given.output), prompts, say))
    except (OutriderError, OSError) as error:
        raise CommandError(str(error)) from error


def read_data(file: Path) -> list[Prompt]:
    """The prompts in a file.  Raises `TraceError`, which names the row."""
    if file.is_dir():
        raise TraceError(f"{file}: is a directory; records hold no prompts: give a file of prompts, or a trace")
    if file.suffix == ".parquet":
        return [case.prompt for case in read_prompts(file)]
    prompts: list[Prompt] = []
    for number, row in enumerate(read_json_lines(file), 1):
        prompt = row.get("messages") if row.get("prompt") is None else row["prompt"]
        if not isinstance(prompt, str | list) or not prompt:
            raise TraceError(f"{file}: row {number}: neither `prompt` (text or token ids) nor `messages`")
        prompts.append(prompt)
    if not prompts:
        raise TraceError(f"{file}: no prompts in it")
    return prompts


async def train(given: argparse.Namespace, settings: dict[str, object], prompts: Sequence[Prompt], say: Say) -> None:
    """Trains until the budget of time or steps is spent.  Raises `CommandError`."""
    given.output.mkdir(parents=True, exist_ok=True, mode=0o700)
    feed = PromptCycle(prompts, say)
    async with AsyncFleet(**settings) as fleet:  # type: ignore[arg-type]
        curve = Curve(given.output / CURVE, say)
        began, now = time.monotonic(), await _learning(fleet)
        while not curve.is_over(now, given):
            if now["owed"] > MOST_OWED:
                await asyncio.sleep(WAIT_S)
            else:
                await feed.answer(fleet, {"temperature": random.choice(TEMPERATURES), "max_tokens": given.max_tokens})
            now = await _learning(fleet)
            curve.add(now, time.monotonic() - began)
    if feed.skipped:
        say(f"{feed.skipped} of {len(prompts)} prompts were skipped")
    if found := newest_head(given.output):
        say(f"the head: --drafter {found}")
    else:
        raise CommandError("no version was better than the first head yet: run this again, for longer")


def newest_head(output: Path) -> Path | None:
    """The latest published version, if there is one."""
    versions = (path for path in output.glob("drafter-0/versions/*") if path.name.isdecimal())
    return max(versions, key=lambda path: int(path.name), default=None)


class PromptCycle:
    """All prompts in random order, again and again.  Prompts that the fleet refuses are skipped from then on."""

    def __init__(self, prompts: Sequence[Prompt], say: Say) -> None:
        self._left = dict(enumerate(prompts, 1))
        self._numbers = self._drawn()
        self._say, self.skipped = say, 0

    async def answer(self, fleet: AsyncFleet, fields: dict[str, Any]) -> None:
        """Has the next prompts answered.  Raises `CommandError` if none is left, and `OutriderError` for other failures."""
        numbers = list(islice(self._numbers, AT_A_TIME))
        ids = [await fleet.submit(self._left[number], fields) for number in numbers]
        errors = await asyncio.gather(*map(fleet.wait, ids), return_exceptions=True)
        for number, error in zip(numbers, errors, strict=True):
            if isinstance(error, OutriderError) and error.status in REFUSED:
                if self._left.pop(number, None) is not None:
                    self.skipped += 1
                    self._say(f"prompt {number} is skipped ({self.skipped} so far): {error.message}")
            elif isinstance(error, BaseException):
                raise error
        if not self._left:
            raise CommandError("every prompt was refused")

    def _drawn(self) -> Iterator[int]:
        while self._left:
            yield from (number for number in random.sample(list(self._left), len(self._left)) if number in self._left)


class Curve:
    """Reports progress on the terminal and in a file, which a further run continues."""

    def __init__(self, file: Path, say: Say) -> None:
        self._file, self._say, self._reported_at = file, say, 0.0
        rows = list(csv.DictReader(file.open(newline="", encoding="utf-8"))) if file.exists() else []
        self.seconds = self._seconds_before = float(rows[-1]["seconds"]) if rows else 0.0

    def is_over(self, now: dict[str, Any], given: argparse.Namespace) -> bool:
        """Whether the budget is spent, earlier runs included."""
        return bool(now["steps"] >= given.steps if given.steps else self.seconds >= 60 * given.minutes)

    def add(self, now: dict[str, Any], seconds: float) -> None:
        """Reports a line, at most every `REPORT_S` seconds."""
        self.seconds = self._seconds_before + seconds
        if time.monotonic() - self._reported_at < REPORT_S:
            return
        self._reported_at = time.monotonic()
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in now.items()}
        row["seconds"] = round(self.seconds, 1)
        with self._file.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
        lengths = " and ".join(
            f"{row[f'{name}_length']:.2f} ({name})" for name in ("candidate", "present") if row[f"{name}_length"] is not None
        )
        loss = "" if row["loss"] is None else f", loss {row['loss']:.3f}"
        held_out = f", held-out acceptance length {lengths}" if lengths else ""
        self._say(f"{self.seconds / 60:.1f} min: step {row['steps']}, version {row['version']}{loss}{held_out}")


def fleet_settings(loaded: Loaded, output: Path) -> dict[str, object]:
    """The arguments of `AsyncFleet`: settings of the user and of this command.

    None of the user's gateway: keys, ports and stored files belong to a fleet that serves, which may be running.
    """
    given = [path for path in loaded.origins if path[0] != "gateway" or path[1] == "chat_template"]
    found = {"_".join(path): reduce(getattr, path, loaded.settings) for path in given}
    where = {"drafting_learning_dir": str(output.absolute())}
    kind = {"drafting_learning": "always"} if found.get("drafter", "grow") != "grow" else {"drafter": "grow"}
    # Mode `sync`, because in other modes drafters that do not pay get no features.
    return found | {"mode": "sync", "drafters": 1, "gateway_state_dir": "none"} | where | kind


async def _learning(fleet: AsyncFleet) -> dict[str, Any]:
    drafters = (await fleet.stats())["drafters"]
    found: dict[str, Any] | None = drafters[0].get("learning") if drafters else None
    # Without a report, the drafter may just be restarting.
    return found or dict.fromkeys(COLUMNS) | {"steps": 0, "owed": 0}
