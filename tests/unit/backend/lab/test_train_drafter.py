"""`outrider train-drafter`: what it takes, refuses and writes down; training itself is in `tests/integration`."""

import argparse
import csv
import json
import random
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pyarrow.parquet as pq
import pytest

from backend.config.environment import outrider_variables
from backend.config.sources import CommandError, ConfigError
from backend.lab.train_drafter import AT_A_TIME, COLUMNS, CURVE, Curve, PromptCycle, main, newest_head, read_data
from backend.records.schema import to_table
from backend.rollout.trace import Case, TraceError, write_cases
from outrider.asynchronous import AsyncFleet, Prompt
from outrider.types import OutriderError, Sample


def write(directory: Path, *rows: object) -> Path:
    file = directory / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_prompts_are_text_tokens_or_messages_or_those_of_a_trace(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    own = ({"messages": messages, "response": "unread"}, {"prompt": None, "messages": messages})
    assert read_data(write(tmp_path, {"prompt": "def f"}, {"prompt": [5, 6]}, *own)) == ["def f", [5, 6], messages, messages]
    write_cases(tmp_path / "train.0.parquet", [Case(0, "def f", "(x)")])
    assert read_data(tmp_path / "train.0.parquet") == ["def f"]
    pq.write_table(to_table("request", []), tmp_path / "request-0.parquet")
    for records, message in ((tmp_path, "records hold no prompts"), (tmp_path / "request-0.parquet", "no column 'prompt'")):
        with pytest.raises(TraceError, match=message):
            read_data(records)


def test_an_output_that_cannot_be_made_is_named_in_one_line(tmp_path: Path) -> None:
    data = write(tmp_path, {"prompt": "x"})
    with pytest.raises(CommandError, match=f"File exists: '{data}'"):
        main(["--data", str(data), "--output", str(data)], print)


@pytest.mark.parametrize("row", [{}, {"prompt": ""}, {"prompt": 7}, {"messages": []}])
def test_a_row_without_a_prompt_is_named(tmp_path: Path, row: dict[str, object]) -> None:
    with pytest.raises(TraceError, match=r"data\.jsonl: row 2: neither"):
        read_data(write(tmp_path, {"prompt": "def f"}, row))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data"),
        (["--minutes", "0"], "--minutes"),
        (["--data", "gone.jsonl"], r"gone\.jsonl: cannot be read"),
        (["--drafting-learning-dir", "/x"], "--drafting-learning-dir: is not for this command"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(tmp_path: Path, arguments: list[str], message: str) -> None:
    given = ["--data", str(write(tmp_path, {"prompt": "x"})), "--output", str(tmp_path / "o")] if arguments else []
    with pytest.raises(ConfigError, match=message):
        main([*given, *arguments], print)


class Fleet:
    """As much of `AsyncFleet` as is asked."""

    def __init__(self, longest: int, status: int = 400) -> None:
        self.longest, self.status = longest, status
        self.answered: list[Prompt] = []

    async def submit(self, prompt: Prompt, fields: object) -> int:
        self.answered.append(prompt)
        return len(self.answered) - 1

    async def wait(self, number: int) -> list[Sample]:
        if len(self.answered[number]) > self.longest:
            raise OutriderError(self.status, None, "too long")
        return []


@pytest.mark.parametrize("seed", range(6))
async def test_prompts_that_cannot_be_answered_are_skipped_and_counted(seed: int) -> None:
    random.seed(seed)
    lines: list[str] = []
    fleet = Fleet(2)
    prompts = PromptCycle(["a", "bb", "ccc"], lines.append)
    for _ in range(4):
        await prompts.answer(cast(AsyncFleet, fleet), {})
    assert (lines, prompts.skipped) == (["prompt 3 is skipped (1 so far): too long"], 1)
    assert fleet.answered[AT_A_TIME:].count("a") + fleet.answered[AT_A_TIME:].count("bb") == 3 * AT_A_TIME
    with pytest.raises(CommandError, match="every prompt was refused"):
        await PromptCycle(["ccc", "dddd"], lines.append).answer(cast(AsyncFleet, fleet), {})
    with pytest.raises(OutriderError, match="too long"):
        await PromptCycle(["ccc"], lines.append).answer(cast(AsyncFleet, Fleet(2, 503)), {})


def test_settings_of_a_fleet_that_serves_reach_the_training_fleet_only_as_far_as_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A given head goes on learning, and any other model gets a new one."""
    config = tmp_path / "fleet.yaml"
    config.write_text("mode: auto\nverifiers: 2\ngateway: {api_key: secret, port: 443, chat_template: t}\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(config))
    monkeypatch.setenv("OUTRIDER_DRAFTERS", "3")
    monkeypatch.setenv("OUTRIDER_GATEWAY__ADMIN_KEY", "secret")
    train = AsyncMock()
    monkeypatch.setattr("backend.lab.train_drafter.train", train)
    given = ["--data", str(write(tmp_path, {"prompt": "x"})), "--output", str(tmp_path / "o")]
    main([*given, "--model", "/m"], print)
    new = train.call_args.args[1]
    assert new.items() >= {"mode": "sync", "drafters": 1, "verifiers": 2, "gateway_chat_template": "t"}.items()
    assert new.items() >= {"model": "/m", "drafter": "grow", "gateway_state_dir": "none"}.items()
    assert new["drafting_learning_dir"].startswith(str(tmp_path / "o"))
    assert "secret" not in repr(new)
    assert not new.keys() & {"gateway_port", "drafting_learning"}
    assert not outrider_variables(), "the fleet inherits them"
    main([*given, "--drafter", "/head"], print)
    assert train.call_args.args[1].items() >= {"drafter": "/head", "drafting_learning": "always"}.items()
    monkeypatch.setenv("OUTRIDER_DRAFTING__LEARNING", "on")
    with pytest.raises(ConfigError, match="OUTRIDER_DRAFTING__LEARNING: is not for this command"):
        main(given, print)


def test_a_further_run_goes_on_with_the_curve_and_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.lab.train_drafter.REPORT_S", 0.0)
    lines: list[str] = []
    budget = argparse.Namespace(minutes=2.0, steps=None)
    for content in ("seconds,steps\n", ""):
        (tmp_path / CURVE).write_text(content)
        assert Curve(tmp_path / CURVE, print).seconds == 0, "a run that ended before its first line"
    learned: dict[str, Any] = dict.fromkeys(COLUMNS) | {"steps": 40, "version": 1, "loss": 2.5, "candidate_length": 1.5}
    first = Curve(tmp_path / CURVE, lines.append)
    first.add(learned, 61.0)
    assert not first.is_over(learned, budget)
    again = Curve(tmp_path / CURVE, lines.append)
    again.add(learned | {"steps": 90}, 60.0)
    assert again.is_over(learned, budget)
    assert not again.is_over(learned, argparse.Namespace(minutes=2.0, steps=41))
    assert (tmp_path / CURVE).read_text().count("seconds") == 1
    with (tmp_path / CURVE).open(newline="") as file:
        found = [(row["seconds"], row["steps"], row["loss"]) for row in csv.DictReader(file)]
    assert found == [("61.0", "40", "2.5"), ("121.0", "90", "2.5")]
    assert lines[0] == "1.0 min: step 40, version 1, loss 2.500, held-out acceptance length 1.50 (candidate)"


def test_the_newest_version_is_the_result(tmp_path: Path) -> None:
    assert newest_head(tmp_path) is None
    for name in ("000009", "000010", ".000011-x"):
        (tmp_path / "drafter-0" / "versions" / name).mkdir(parents=True)
    found = newest_head(tmp_path)
    assert found is not None
    assert found.name == "000010"
