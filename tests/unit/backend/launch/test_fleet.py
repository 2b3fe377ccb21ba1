"""Members that start together, and one that is added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.config import Settings
from backend.config.sources import load
from backend.launch import fleet
from backend.launch.cluster import RayCluster
from backend.launch.fleet import LaunchedFleet
from backend.launch.plan import Hardware, LaunchError, MemberPlan, plan
from backend.launch.rooms import ReservedBundles
from backend.models.resolve import ResolvedModels

MODELS = ResolvedModels("/t", "/d", "eagle", "demo")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The members that were started, in order."""
    names: list[str] = []

    def start(member: MemberPlan, *_: Any) -> Any:
        names.append(member.member_id)
        return SimpleNamespace(plan=member, member_id=member.member_id, ready=False)

    monkeypatch.setattr(fleet, "start", start)
    return names


def make(gpus: float, **changes: Any) -> LaunchedFleet:
    decided = plan(Settings.model_validate(changes), MODELS, Hardware([0, 1], gpus, local=True), Path("/run/x"))
    coordinator = SimpleNamespace(wait_started=lambda: None)
    return LaunchedFleet(cast(Any, SimpleNamespace(ours=True, namespace="x")), cast(Any, coordinator), decided)


class NoRoom(ReservedBundles):
    def check(self, member: MemberPlan) -> None:
        raise LaunchError(f"no room for {member.member_id}")


def test_a_member_is_added_only_where_ray_has_room_for_it(started: list[str]) -> None:
    served = make(2.0)
    served.rooms = NoRoom()
    with pytest.raises(LaunchError, match="no room for verifier-0"):
        served.add("verifier")
    assert not started


@pytest.mark.parametrize(
    ("gpus", "verifiers", "drafters", "told"),
    [
        (1, 2, 2, ["verifier-0", "wait", "verifier-1", "wait", "drafter-0", "drafter-1"]),
        (2, 2, 1, ["verifier-0", "verifier-1", "wait", "drafter-0"]),
        (2, 1, 2, ["verifier-0", "drafter-0", "drafter-1"]),
        (0, 2, 1, ["verifier-0", "verifier-1", "drafter-0"]),
    ],
)
def test_who_shares_a_gpu_starts_after_its_verifier_serves(
    started: list[str], monkeypatch: pytest.MonkeyPatch, gpus: float, verifiers: int, drafters: int, told: list[str]
) -> None:
    """vLLM would count the memory that a neighbour takes meanwhile."""

    def wait_ready(self: LaunchedFleet, say: Any, members: Sequence[Any]) -> None:
        if not all(each.ready for each in members):
            started.append("wait")
        for each in members:
            each.ready = True

    monkeypatch.setattr(LaunchedFleet, "wait_ready", wait_ready)
    make(gpus, verifiers=verifiers, drafters=drafters)._start_members(lambda line: None)
    assert started == told


def test_the_logs_of_a_member_that_cannot_start_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    logs = tmp_path / "own" / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("NCCL")

    def check() -> None:
        raise LaunchError("verifier-0 failed to start")

    served = make(1.0)
    served.cluster = RayCluster("", "x", tmp_path / "own")
    failing: Any = SimpleNamespace(member_id="verifier-0", ready=False, check=check)
    with pytest.raises(LaunchError, match=r"failed to start .logs: .*failed-start"):
        served.wait_ready(lambda line: None, [failing])
    assert (tmp_path / "state" / "outrider" / "failed-start" / "worker.err").read_text() == "NCCL"


def test_the_program_that_started_it_is_told_once_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    monkeypatch.setenv("OUTRIDER_READY_FILE", str(ready))
    assert load([]).settings == Settings(), "it is no setting"
    monkeypatch.setattr("backend.launch.state.write", lambda _: None)
    served = make(0.0)
    served.cluster = cast(Any, SimpleNamespace(namespace="x", address="a", temp_dir=None, ours=True))
    served.announce("")
    assert not ready.exists()
    served.announce("http://127.0.0.1:8000")
    assert ready.read_text() == "http://127.0.0.1:8000"
