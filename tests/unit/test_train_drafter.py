"""`outrider train-drafter`: what it takes, refuses and writes down; training itself is in `tests/integration`."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from backend.config.sources import ConfigError, load
from backend.rollout.trace import TraceError
from gateway.train_drafter import COLUMNS, CURVE, Curve, fleet_settings, main, newest_head, read_data


def write(directory: Path, *rows: object) -> Path:
    file = directory / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_prompts_are_text_tokens_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    file = write(tmp_path, {"prompt": "def f"}, {"prompt": [5, 6]}, {"messages": messages, "response": "unread"})
    assert read_data(file) == ["def f", [5, 6], messages]


@pytest.mark.parametrize("row", [{}, {"prompt": ""}, {"prompt": 7}, {"messages": []}])
def test_a_row_without_a_prompt_is_named(tmp_path: Path, row: dict[str, object]) -> None:
    with pytest.raises(TraceError, match=r"data\.jsonl: row 2: neither"):
        read_data(write(tmp_path, {"prompt": "def f"}, row))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data"),
        (["--minutes", "0"], "--minutes"),
        (["--steps", "0"], "--steps"),
        (["--drafters", "2"], "--drafters: is not for this command"),
        (["--drafting-learning-dir", "/x"], "--drafting-learning-dir: is not for this command"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(tmp_path: Path, arguments: list[str], message: str) -> None:
    given = ["--data", str(write(tmp_path, {"prompt": "x"})), "--output", str(tmp_path / "o")] if arguments else []
    with pytest.raises(ConfigError, match=message):
        main([*given, *arguments], print)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl: cannot be read"):
        main(["--data", str(tmp_path / "gone.jsonl"), "--output", str(tmp_path)], print)


def test_a_given_head_goes_on_learning_and_any_other_model_gets_a_new_one(tmp_path: Path) -> None:
    loaded = load(["--model", "/m", "--verifier-cores", "2"])
    assert fleet_settings(loaded, tmp_path) == {
        "mode": "sync",
        "drafters": 1,
        "model": "/m",
        "verifier_cores": 2,
        "drafter": "grow",
        "drafting_learning_dir": str(tmp_path),
    }
    given = fleet_settings(load(["--drafter", "/head"]), tmp_path)
    assert (given["drafter"], given["drafting_learning"]) == ("/head", "always")


def test_a_further_run_goes_on_with_the_curve_and_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.train_drafter.TOLD_S", 0.0)
    said: list[str] = []
    budget = argparse.Namespace(minutes=2.0, steps=None)
    learned: dict[str, Any] = dict.fromkeys(COLUMNS) | {"steps": 40, "version": 1, "loss": 2.5, "candidate_length": 1.5}
    first = Curve(tmp_path / CURVE, said.append)
    first.add(learned, 61.0)
    assert not first.is_over(learned, budget)
    again = Curve(tmp_path / CURVE, said.append)
    again.add(learned | {"steps": 90}, 60.0)
    assert again.is_over(learned, budget)
    assert not again.is_over(learned, argparse.Namespace(minutes=2.0, steps=41))
    with (tmp_path / CURVE).open(newline="") as file:
        assert [(row["seconds"], row["steps"], row["loss"]) for row in csv.DictReader(file)] == [
            ("61.0", "40", "2.5"),
            ("121.0", "90", "2.5"),
        ]
    assert said[0] == "1.0 min: step 40, version 1, loss 2.500, held-out acceptance length 1.50 (candidate)"


def test_the_newest_version_is_the_result(tmp_path: Path) -> None:
    assert newest_head(tmp_path) is None
    for name in ("000009", "000010", ".000011-x"):
        (tmp_path / "drafter-0" / "versions" / name).mkdir(parents=True)
    found = newest_head(tmp_path)
    assert found is not None
    assert found.name == "000010"
