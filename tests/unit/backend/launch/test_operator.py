"""Operations: what one that cannot be carried out says, and what one leaves behind; and how lost members come back."""

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import ray
import ray.exceptions

from backend.coordinator.messages import CoordinatorUnavailable
from backend.fleet import FleetSnapshot, MemberKind, MemberView, Operation, OperationKind
from backend.launch.operator import ABSENT_S, Operator
from backend.launch.plan import LaunchError, MemberPlan
from backend.launch.processes import Started
from tests.support.fleet_story import member


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.launch.operator.POLL_S", 0.0)


NOBODY = itertools.repeat(FleetSnapshot(1, [], [], {}))


def fleet_of(*members: str, death: str | None = None, **fields: Any) -> Mock:
    """A launcher with these members.  `death`: what their processes died of, if they did."""
    return Mock(members={name: Mock(began=math.inf, death=Mock(return_value=death)) for name in members}, **fields)


def carried_out(
    fleet: Mock, *operations: Operation, lost: int | None = None, snapshots: Iterator[FleetSnapshot] = NOBODY
) -> list[Operation]:
    """How the operations end, as the coordinator hears it.  It is away when the one of the number `lost` ends."""
    ended: list[Operation] = []
    over = threading.Event()

    def progress(reported: Operation | None = None) -> Operation | None:
        if reported is None:
            return operations[len(ended)] if len(ended) < len(operations) else None
        if reported.state in ("done", "failed"):
            ended.append(reported)
            if len(ended) == len(operations):
                over.set()
            if reported.id == lost:
                raise CoordinatorUnavailable("away")
        return None

    fleet.coordinator = Mock(progress=progress, snapshot=lambda: next(snapshots))
    with ExitStack() as fleet.ending:
        Operator(fleet, lambda line: None).start()
        assert over.wait(120)
    assert "operator" not in {each.name for each in threading.enumerate()}, "it ends with its fleet"
    return ended


def test_members_of_another_launcher_are_left_alone_and_an_end_that_cannot_be_told_is_not_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backend.launch.operator.AWAY_LIMIT_S", -1.0)
    kinds: tuple[OperationKind, ...] = ("remove", "restart", "swap-drafter")
    ended = carried_out(fleet_of(), *(Operation(number, kind, ["verifier-9"]) for number, kind in enumerate(kinds)), lost=0)
    note = "verifier-9 is not one of this launcher's members"
    assert ended == [Operation(number, kind, ["verifier-9"], "failed", note) for number, kind in enumerate(kinds)]


def test_the_name_of_a_removed_member_is_free_of_its_drain() -> None:
    """`add` may use the name again."""
    fleet = fleet_of("verifier-1", death="ValueError: no GPU")
    carried_out(fleet, Operation(7, "remove", ["verifier-1"]))
    done = [(name, arguments[0]) for name, arguments, _ in fleet.mock_calls if name.endswith(("drain", "end", "resume"))]
    assert done == [("coordinator.drain", "verifier-1"), ("end", "verifier-1"), ("coordinator.resume", "verifier-1")]


def test_a_running_member_is_not_ended_because_a_restarted_coordinator_does_not_know_it_yet() -> None:
    fleet = fleet_of("verifier-1")
    seen: list[int] = []

    def snapshots() -> Iterator[FleetSnapshot]:
        for count in range(4):
            seen.append(len(fleet.end.mock_calls))
            view = MemberView(member("verifier-1", "verifier", "lost"), 0.1)
            yield FleetSnapshot(1, [view] if count == 3 else [], [], {})

    carried_out(fleet, Operation(7, "remove", ["verifier-1"]), snapshots=itertools.chain(snapshots(), NOBODY))
    assert seen == [0] * 4
    fleet.end.assert_called_once_with("verifier-1")


def test_a_member_that_could_not_be_restarted_gets_work_when_it_is_back() -> None:
    fleet = fleet_of("verifier-1", death="RuntimeError", wait_ready=Mock(side_effect=LaunchError("no GPU")))
    (ended,) = carried_out(fleet, Operation(7, "restart", ["verifier-1"]))
    assert (ended.state, ended.note) == ("failed", "no GPU")
    fleet.coordinator.resume.assert_called_once_with("verifier-1")


def test_a_restarted_coordinator_is_told_what_the_one_before_it_knew_until_it_has_taken_it() -> None:
    told: list[FleetSnapshot] = []
    snapshots = [FleetSnapshot(1, [], [], {}, pins={"d0": ["v0"]}, coordinator="a")]
    snapshots += [FleetSnapshot(9, [], [], {}, coordinator=name) for name in "bbcc"]

    def restore(before: FleetSnapshot) -> None:
        told.append(before)
        if len(told) == 1:
            raise CoordinatorUnavailable("away")

    coordinator = SimpleNamespace(snapshot=lambda: snapshots.pop(0), restore=restore)
    operator = Operator(cast(Any, SimpleNamespace(coordinator=coordinator)), lambda line: None)
    operator._remind()
    with pytest.raises(CoordinatorUnavailable):
        operator._remind()
    for _ in range(3):
        operator._remind()
    assert [each.pins for each in told] == [{"d0": ["v0"]}] * 3, "twice the same, then the next one"


@pytest.mark.parametrize("looks", [0, 1])
def test_a_coordinator_that_is_restarted_while_a_member_loads_is_told_of_its_drain_before_that_ends(looks: int) -> None:
    """Told afterwards, the member would stay drained.  Drains of others are told while the member loads."""
    fleet = fleet_of("verifier-1", death="ValueError")
    drained = MemberView(member("verifier-1", "verifier", "lost"), 0.1)
    coordinators = ["a", "a"]

    def snapshots() -> Iterator[FleetSnapshot]:
        while True:
            yield FleetSnapshot(1, [drained], [], {}, coordinator=coordinators[-1])

    def wait_ready(say: Any, members: Any, unless: Any) -> None:
        coordinators.append("b")
        for _ in range(looks):
            unless()
        assert len(fleet.coordinator.restore.mock_calls) == looks

    fleet.wait_ready = wait_ready
    carried_out(fleet, Operation(7, "restart", ["verifier-1"]), snapshots=snapshots())
    told = [name for name, _, _ in fleet.coordinator.mock_calls if name in ("drain", "restore", "resume")]
    assert told == ["drain", "restore", "resume"]


@pytest.mark.parametrize(
    ("kind", "gpus", "order"),
    [
        ("verifier", 0.4, ["0", "wait", "1", "wait"]),
        ("verifier", 1.0, ["0", "1", "wait"]),
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

    carried_out(fleet_of(add=add, wait_ready=wait_ready), Operation(7, "add", ["", ""], add=kind))
    assert done == order


ACTOR = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: "again"))


def lost(dead: bool) -> Mock:
    """A member's actor that is dead, or is still being restarted."""
    return Mock(ready=False, began=-ABSENT_S, death=Mock(return_value="ValueError: no GPU" if dead else None))


def test_a_member_that_ray_has_given_up_is_started_again_now_and_then() -> None:
    dead, back = lost(True), lost(False)
    members = {"verifier-0": dead, "drafter-0": lost(False), "drafter-1": lost(True)}
    lines: list[str] = []
    start = Mock(side_effect=[LaunchError("no room"), back])
    operator = Operator(cast(Any, SimpleNamespace(coordinator=None, members=members, start=start)), lines.append)
    serving = MemberView(member("drafter-1", "drafter"), 0.1)
    counts = []
    for now in (0.0, 1.0, ABSENT_S, ABSENT_S + 1, 2 * ABSENT_S):
        operator._revive(FleetSnapshot(1, [serving], [], {}), now)
        members["verifier-0"] = back if start.call_count == 2 else dead
        counts.append(start.call_count)
    assert counts == [1, 1, 2, 2, 2]
    was_lost = "verifier-0 was lost, and is started again: ValueError: no GPU"
    assert lines == [was_lost, "verifier-0 cannot be started again: no room", was_lost]
    assert {call.args for call in start.call_args_list} == {(dead.plan,)}
    assert back.ready


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        (ray.exceptions.ActorDiedError(), True),
        (ray.exceptions.ActorUnavailableError("", None), False),
        (ray.exceptions.GetTimeoutError(), False),
        (ray.exceptions.ActorUnschedulableError("no room"), True),
        (None, False),
    ],
)
def test_only_an_actor_that_ray_has_given_up_is_dead(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, dead: bool
) -> None:
    monkeypatch.setattr(ray, "get", Mock(side_effect=error))
    assert (Started(cast(Any, None), ACTOR, None, 0.0).death() is not None) == dead


def test_an_actor_that_has_answered_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", Mock(side_effect=[None, ray.exceptions.ActorDiedError()]))
    member = Started(cast(Any, None), ACTOR, "first", 0.0)
    assert member.death() is None
    assert member.death() is not None
    assert [call.args for call in cast(Any, ray.get).call_args_list] == [("first",), ("again",)]
