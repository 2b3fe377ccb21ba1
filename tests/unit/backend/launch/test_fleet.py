"""Members that start together, one that is added, and a fleet that joins a cluster."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from backend.config import Settings
from backend.config.sources import load
from backend.launch import fleet, state
from backend.launch.cluster import RayCluster
from backend.launch.fleet import LaunchedFleet, _plan_for
from backend.launch.plan import Hardware, LaunchError, MemberPlan, plan
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
    return LaunchedFleet(cast(Any, SimpleNamespace(ours=True, namespace="x")), cast(Any, coordinator), decided, cast(Any, None))


def test_a_member_is_added_only_where_ray_has_room_for_it(started: list[str]) -> None:
    served = make(2.0)
    served.rooms = Mock(check=Mock(side_effect=LaunchError("no room for verifier-0")))
    with pytest.raises(LaunchError, match="no room for verifier-0"):
        served.add("verifier")
    assert not started


@pytest.mark.parametrize(
    ("gpus", "verifiers", "drafters", "order"),
    [
        (1, 2, 2, ["verifier-0", "wait", "verifier-1", "wait", "drafter-0", "drafter-1"]),
        (2, 2, 1, ["verifier-0", "verifier-1", "wait", "drafter-0"]),
        (2, 1, 2, ["verifier-0", "drafter-0", "drafter-1"]),
        (0, 2, 1, ["verifier-0", "verifier-1", "drafter-0"]),
    ],
)
def test_who_shares_a_gpu_starts_after_its_verifier_serves(
    started: list[str], monkeypatch: pytest.MonkeyPatch, gpus: float, verifiers: int, drafters: int, order: list[str]
) -> None:
    """vLLM would count the memory that a neighbour takes meanwhile."""

    def wait_ready(self: LaunchedFleet, say: Any, members: Sequence[Any]) -> None:
        if not all(each.ready for each in members):
            started.append("wait")
        for each in members:
            each.ready = True

    monkeypatch.setattr(LaunchedFleet, "wait_ready", wait_ready)
    make(gpus, verifiers=verifiers, drafters=drafters)._start_members(lambda line: None)
    assert started == order


def test_the_logs_of_a_member_that_cannot_start_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    logs = tmp_path / "own" / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("NCCL")

    served = make(1.0)
    served.cluster = RayCluster("", "x", tmp_path / "own")
    failing: Any = Mock(member_id="verifier-0", ready=False)
    failing.death.return_value = "no GPU"
    with pytest.raises(LaunchError, match=r"verifier-0 failed to start: no GPU .logs: .*failed-start"):
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


def test_a_damaged_file_hides_no_other_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state, "home", lambda: tmp_path)
    mine = state.FleetFile(os.getpid(), "mine", "a", "", [])
    state.write(mine)
    for number, damaged in enumerate((b"", b'{"pid": 1', b'{"pid": 1, "namespace": "\xff"}')):
        (tmp_path / f"fleet-{number}.json").write_bytes(damaged)
    assert state.running() == [mine]


def planned(cpus: float, gpus: float = 0.0, **changes: Any) -> Any:
    cluster = SimpleNamespace(ours=False, cpus=cpus, gpus=gpus)
    return _plan_for(cast(Any, cluster), Settings.model_validate(changes), MODELS, Path("/run/x"))


def test_a_joined_cluster_with_too_few_devices_is_refused_and_gpus_are_shared() -> None:
    assert len(planned(2).members) == 2
    refused: tuple[tuple[int, dict[str, Any], str], ...] = (
        (1, {}, "needs 2 CPUs and the Ray cluster has 1"),
        (2, {"drafting": {"gpus": 2}}, "needs 2 GPUs and the cluster has 0"),
    )
    for cpus, changes, message in refused:
        with pytest.raises(LaunchError, match=message):
            planned(cpus, **changes)
    assert [member.num_gpus for member in planned(0, gpus=1).members] == [0.501, 0.499]
    assert len(planned(16, verifiers="auto").members) == 16, "the CPUs of all nodes count"
