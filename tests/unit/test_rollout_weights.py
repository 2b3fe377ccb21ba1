"""Weights for a rollout's later rounds, and the curves of its figures."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.config.sources import ConfigError
from backend.models.demo import TARGET_DIR
from backend.rollout.log import RoundLog
from backend.rollout.weights import WeightsError, check_weights, newest


def test_the_newest_is_the_highest_step_or_the_one_that_is_named(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for name in ("step-9", "step_10", "step-11.part", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-12").touch()
    assert newest(tmp_path) == tmp_path / "step_10"
    (tmp_path / "latest").write_text("other\n")
    assert newest(tmp_path) == tmp_path / "other"
    for nothing in ("", "gone"):
        (tmp_path / "latest").write_text(nothing)
        with pytest.raises(WeightsError, match="no such directory"):
            newest(tmp_path)
    with pytest.raises(WeightsError, match="No such file"):
        newest(tmp_path / "nowhere")


def test_what_does_not_fit_is_found_before_anything_starts(tmp_path: Path) -> None:
    check_weights(tmp_path, str(TARGET_DIR))
    shutil.copytree(TARGET_DIR, tmp_path / "step-1")
    check_weights(tmp_path, str(TARGET_DIR))
    (tmp_path / "step-2").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "step-2" / "model.safetensors")
    with pytest.raises(WeightsError, match="step-2: other tensors"):
        check_weights(tmp_path, str(TARGET_DIR))


REPORT: Mapping[str, Any] = {
    "workers": [{"busy_s": 3.0, "idle_s": {"no_work": 0.5, "swap": 0.5}}, {"busy_s": 4.0, "idle_s": {}}],
    "acceptance_is": "live",
    "live_acceptance_length": 2.5,
    "tokens_per_s": 100.0,
    "wall_s": 4.0,
}
FIGURES = {
    "rollout/idle_share": 0.125,
    "rollout/live_acceptance_length": 2.5,
    "rollout/tokens_per_s": 100.0,
    "rollout/wall_s": 4.0,
}


def test_figures_go_to_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            said.append(directory)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            said.append((name, value, step))

        def flush(self) -> None:
            said.append("flushed")

        def close(self) -> None:
            said.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    log = RoundLog("tensorboard:/logs")
    log.close()
    assert said == []
    log.write(7, REPORT)
    log.close()
    assert (said[0], said[-2:]) == ("/logs", ["flushed", "closed"])
    assert sorted(said[1:-2]) == [(name, value, 7) for name, value in FIGURES.items()]


def test_figures_go_to_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(log=lambda scalars, step: said.append((scalars, step)), finish=lambda: said.append("finished"))

    def init(project: str) -> SimpleNamespace:
        said.append(project)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = RoundLog("wandb:mine")
    log.write(7, REPORT)
    log.write(8, {**REPORT, "live_acceptance_length": None})
    log.close()
    assert said[:2] == ["mine", (FIGURES, 7)]
    assert "rollout/live_acceptance_length" not in said[2][0]
    assert said[3:] == ["finished"]


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("wandb", "tensorboard:DIR or wandb:PROJECT"),
        ("csv:x", "tensorboard:DIR or wandb:PROJECT"),
        ("wandb:x", "the Python package wandb is not installed"),
        ("tensorboard:x", "the Python package tensorboard is not installed"),
    ],
)
def test_a_log_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, wanted: str, complaint: str) -> None:
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=complaint):
        RoundLog(wanted)
