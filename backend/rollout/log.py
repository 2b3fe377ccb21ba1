"""Logs figures of each round to TensorBoard or Weights & Biases, if the package is installed.  The command's process."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from backend.config.sources import ConfigError

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class RoundLog:
    """Logs to `tensorboard:DIR` or `wandb:PROJECT`.  Raises `ConfigError` for anything else, or without the package."""

    def __init__(self, wanted: str) -> None:
        self._kind, _, self._place = wanted.partition(":")
        if self._kind not in PACKAGES or not self._place:
            raise ConfigError(f"--log {wanted}: it is tensorboard:DIR or wandb:PROJECT")
        try:
            self._package: Any = import_module(PACKAGES[self._kind])
        except ImportError as error:
            raise ConfigError(f"--log {wanted}: the Python package {self._kind} is not installed") from error
        self._writer: Any = None

    def write(self, step: int, report: Mapping[str, Any]) -> None:
        """Logs one round's figures.  The first call opens the log, so a rollout that fails before leaves none."""
        scalars = figures(report)
        if self._kind == "wandb":
            self._writer = self._writer or self._package.init(project=self._place)
            self._writer.log(scalars, step=step)
            return
        self._writer = self._writer or self._package.SummaryWriter(self._place)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            (self._writer.finish if self._kind == "wandb" else self._writer.close)()


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """The scalars to log, by name, from a round's `report.json`."""
    busy = sum(worker["busy_s"] for worker in report["workers"])
    idle = sum(sum(worker["idle_s"].values()) for worker in report["workers"])
    length = report[f"{report['acceptance_is']}_acceptance_length"]
    found = {"tokens_per_s": report["tokens_per_s"], "wall_s": report["wall_s"], "idle_share": idle / max(busy + idle, 1e-9)}
    if length is not None:
        found[f"{report['acceptance_is']}_acceptance_length"] = length
    return {f"rollout/{name}": value for name, value in found.items()}
