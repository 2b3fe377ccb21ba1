"""A fleet that joins a cluster which is still growing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.config import Settings
from backend.launch import fleet
from backend.launch.fleet import _plan_when_there_is_room
from backend.launch.plan import LaunchError
from backend.models.resolve import ResolvedModels

MODELS = ResolvedModels("/t", "/d", "eagle", "demo")


class Growing:
    """A cluster that has a CPU more every time somebody looks, and the next of `gpus` until the last one stays."""

    def __init__(self, ours: bool = False, gpus: Sequence[float] = (0.0,)) -> None:
        self.ours, self._gpus = ours, gpus
        self.looks = 0

    @property
    def gpus(self) -> float:
        self.looks += 1
        return self._gpus[min(self.looks, len(self._gpus)) - 1]

    @property
    def cpus(self) -> float:
        return float(self.looks - 1)


def attempt(cluster: Any, wait_s: float, told: list[str], **changes: Any) -> Any:
    settings = Settings.model_validate({"ray": {"wait_s": wait_s}, **changes})
    return _plan_when_there_is_room(settings, MODELS, cluster, Path("/run/x"), told.append)


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda seconds: None))


def test_it_waits_until_there_is_room_and_plans_for_what_is_there_then() -> None:
    told: list[str] = []
    decided = attempt(Growing(), 60, told)
    assert len(decided.members) == 2
    assert told == ["waiting up to 60 s for the cluster to grow: the fleet needs 2 CPUs and the Ray cluster has 0"]


def test_without_patience_it_says_what_is_missing_at_once() -> None:
    with pytest.raises(LaunchError, match="needs 2 CPUs"):
        attempt(Growing(), 0, [])
    with pytest.raises(LaunchError, match="needs 40 CPUs"):
        attempt(Growing(), 5, [], verifiers=20, drafters=20)
    with pytest.raises(LaunchError, match="GPUs and the cluster has 0"):
        attempt(Growing(), 5, [], drafting={"gpus": 2})


def test_gpus_are_shared_only_when_the_wait_is_over() -> None:
    told: list[str] = []
    decided = attempt(Growing(gpus=[1, 1, 2]), 60, told)
    assert [member.num_gpus for member in decided.members] == [1, 1]
    assert told == ["waiting up to 60 s for the cluster to grow: the fleet needs 2 GPUs and the cluster has 1"]
    waited = Growing(gpus=[1])
    assert [member.num_gpus for member in attempt(waited, 5, []).members] == [0.501, 0.499]
    assert waited.looks > 1


@pytest.mark.parametrize(("ours", "wait_s"), [(False, 0), (True, 60)])
def test_without_patience_gpus_are_shared_at_once(ours: bool, wait_s: float) -> None:
    cluster = Growing(ours, gpus=[1, 2])
    assert [member.num_gpus for member in attempt(cluster, wait_s, []).members] == [0.501, 0.499]


def test_auto_counts_the_cpus_of_all_nodes() -> None:
    cluster = Growing()
    cluster.looks = 16
    assert len(attempt(cluster, 0, [], verifiers="auto").members) == 16
