"""Operations: what one that cannot be carried out says, and what one leaves behind; and how lost members come back."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import ray
import ray.exceptions

from backend.coordinator.messages import CoordinatorUnavailable
from backend.fleet import FleetSnapshot, Member, MemberKind, MemberView, Operation, OperationKind
from backend.launch.operator import ABSENT_S, Operator
from backend.launch.plan import LaunchError, MemberPlan
from backend.launch.processes import Started


@pytest.mark.parametrize("kind", ["remove", "restart", "swap-drafter"])
def test_members_of_another_launcher_are_left_alone(kind: OperationKind) -> None:
    reported: list[Operation] = []
    fleet = SimpleNamespace(coordinator=SimpleNamespace(progress=reported.append), members={})
    operator = Operator(cast(Any, fleet), lambda line: None)
    operator._carry_out(Operation(7, kind, ["verifier-9"]))
    assert reported[-1] == Operation(7, kind, ["verifier-9"], "failed", "verifier-9 is not one of this launcher's members")


def test_an_end_that_cannot_be_told_does_not_end_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.launch.operator.AWAY_LIMIT_S", -1.0)
    monkeypatch.setattr("backend.launch.operator.POLL_S", 0.0)
    operations = [Operation(7, "remove", ["verifier-9"]), Operation(8, "remove", ["verifier-9"])]

    def progress(reported: Operation | None = None) -> Operation | None:
        if reported is None:
            return operations[0]
        if reported.state == "failed" and len(operations) == 1:
            operator._stopping.set()
        elif reported.state == "failed":
            # The coordinator is restarted after this, and takes another operation.
            operations.pop(0)
            raise CoordinatorUnavailable("away")
        return None

    coordinator = SimpleNamespace(progress=progress, snapshot=lambda: FleetSnapshot(1, [], [], {}))
    operator = Operator(cast(Any, SimpleNamespace(coordinator=coordinator, members={})), lambda line: None)
    operator._run()
    assert [each.id for each in operations] == [8]


def lost(dead: bool) -> Mock:
    """A member's actor that is dead, or is still being restarted."""
    return Mock(ready=False, death=Mock(return_value="ValueError: no GPU" if dead else None))


def test_a_member_that_ray_has_given_up_is_started_again_now_and_then() -> None:
    dead, restarting, serving = lost(True), lost(False), lost(True)
    members = {"verifier-0": dead, "drafter-0": restarting, "drafter-1": serving}
    lines: list[str] = []
    attempts: list[Any] = []

    def start(plan: Any) -> Any:
        attempts.append(plan)
        if len(attempts) == 1:
            raise LaunchError("no room")
        members["verifier-0"] = lost(False)
        return members["verifier-0"]

    operator = Operator(cast(Any, SimpleNamespace(coordinator=None, members=members, start=start)), lines.append)
    view = MemberView(Member("drafter-1", "drafter", "i", "", "", "n", 1, "m", "ready"), 0.1)
    snapshot = FleetSnapshot(1, [view], [], {})
    counts = []
    for now in (0.0, 1.0, ABSENT_S, ABSENT_S + 1, 2 * ABSENT_S):
        operator._revive(snapshot, now)
        counts.append(len(attempts))
    assert counts == [1, 1, 2, 2, 2]
    was_lost = "verifier-0 was lost, and is started again: ValueError: no GPU"
    assert lines == [was_lost, "verifier-0 cannot be started again: no room", was_lost]
    assert attempts == [dead.plan, dead.plan]
    assert members["verifier-0"].ready


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (ray.exceptions.ActorDiedError(), True),
        (ray.exceptions.ActorUnavailableError("", None), False),
        (ray.exceptions.GetTimeoutError(), False),
        (None, False),
    ],
)
def test_only_an_actor_that_ray_has_given_up_is_dead(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, dead: bool
) -> None:
    actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: "ready"))
    monkeypatch.setattr(ray, "get", Mock(side_effect=error))
    assert (Started(cast(Any, None), actor, None, 0.0).death() is not None) == dead


def test_the_name_of_a_removed_member_is_free_of_its_drain() -> None:
    """`add` may use the name again."""
    fleet = Mock(members={"verifier-1": None})
    fleet.coordinator.snapshot.return_value = FleetSnapshot(1, [], [], {})
    Operator(fleet, lambda line: None)._carry_out(Operation(7, "remove", ["verifier-1"]))
    done = [(name, arguments[0]) for name, arguments, _ in fleet.mock_calls if name.endswith(("drain", "end", "resume"))]
    assert done == [("coordinator.drain", "verifier-1"), ("end", "verifier-1"), ("coordinator.resume", "verifier-1")]


def test_a_member_that_could_not_be_restarted_gets_work_when_it_is_back() -> None:
    fleet = Mock(members={"verifier-1": Mock()})
    fleet.coordinator.snapshot.return_value = FleetSnapshot(1, [], [], {})
    fleet.wait_ready.side_effect = LaunchError("no GPU")
    Operator(fleet, lambda line: None)._carry_out(Operation(7, "restart", ["verifier-1"]))
    assert fleet.coordinator.progress.call_args.args == (Operation(7, "restart", ["verifier-1"], "failed", "no GPU"),)
    fleet.coordinator.resume.assert_called_once_with("verifier-1")


@pytest.mark.parametrize(
    ("kind", "gpus", "order"),
    [
        ("verifier", 0.4, ["0", "wait", "1", "wait"]),
        ("verifier", 1.0, ["0", "1", "wait"]),
        ("verifier", 0.0, ["0", "1", "wait"]),
        ("drafter", 0.4, ["0", "1", "wait"]),
    ],
)
def test_added_verifiers_of_one_gpu_start_one_after_the_other(kind: MemberKind, gpus: float, order: list[str]) -> None:
    """vLLM would count the memory that a neighbour takes meanwhile."""
    done: list[str] = []
    ready: set[str] = set()

    def add(kind: MemberKind) -> Any:
        name = str(len(done) - done.count("wait"))
        done.append(name)
        return SimpleNamespace(plan=MemberPlan(name, kind, [], 0, gpus, ""), member_id=name)

    def wait_ready(say: Any, members: list[Any], unless: Any) -> None:
        names = {each.member_id for each in members}
        if names - ready:
            done.append("wait")
        ready.update(names)

    fleet = Mock(add=add, wait_ready=wait_ready)
    Operator(fleet, lambda line: None)._carry_out(Operation(7, "add", ["", ""], add=kind))
    assert done == order


def test_the_end_of_the_fleet_ends_the_operator() -> None:
    with ExitStack() as ending:
        operator = Operator(cast(Any, SimpleNamespace(coordinator=None, ending=ending)), lambda line: None)
        operator.start()
    assert operator._stopping.is_set()
