"""What an administrator is told of an operation that cannot be carried out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.coordinator.messages import Progress
from backend.fleet import Assignment, FleetSnapshot, Member, MemberView, Operation, OperationKind, VerifierStats
from backend.launch import operator as operators
from backend.launch.operator import Operator


@pytest.mark.parametrize("kind", ["remove", "restart", "swap-drafter"])
def test_members_of_another_launcher_are_left_alone(kind: OperationKind) -> None:
    told: list[Progress] = []
    fleet = SimpleNamespace(coordinator=SimpleNamespace(progress=told.append), members={})
    operator = Operator(cast(Any, fleet), lambda line: None)
    operator._carry_out(Operation(7, kind, ["verifier-9"]))
    assert told[-1] == Progress(7, "failed", "verifier-9 is not one of this launcher's members")


class Coordinator:
    """Shows one snapshot after the other, and its clock goes on by a second with each."""

    def __init__(self, snapshots: list[FleetSnapshot]) -> None:
        self.snapshots = snapshots
        self.now = 0.0

    def drain(self, member_id: str, migrate_after_s: float) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def snapshot(self) -> FleetSnapshot:
        self.now += 1
        return self.snapshots.pop(0)


def seen(member: Member, verifier: VerifierStats | None = None, *verifiers: str) -> FleetSnapshot:
    """The fleet with this member, which drafts for these verifiers."""
    return FleetSnapshot(1, [MemberView(member, 0.1, verifier)], [Assignment(each, member.id, 1) for each in verifiers], {})


def verifier(running: int = 0, waiting: int = 0) -> FleetSnapshot:
    stats = VerifierStats("v0", 0.0, "sync", 4, running=running, waiting=waiting)
    return seen(Member("v0", "verifier", "i", "", "", "n", 1, "m", "draining"), stats)


DRAFTER = Member("d0", "drafter", "i", "", "", "n", 1, "m", "draining")


@pytest.mark.parametrize(
    ("member_id", "snapshots", "deadline_s"),
    [
        ("v0", [verifier(1), verifier(), verifier(0, 1), verifier(), verifier()], 99),
        ("v0", [seen(Member("v0", "verifier", "i", "", "", "n", 1, "m")), verifier(), verifier()], 99),
        ("v0", [FleetSnapshot(1, [], [], {})] * 2, 99),
        ("v0", [verifier(1)] * 4, 3),
        ("d0", [seen(DRAFTER, None, "v0"), seen(DRAFTER), seen(DRAFTER)], 99),
    ],
)
def test_a_member_is_ended_after_a_while_without_work_or_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, member_id: str, snapshots: list[FleetSnapshot], deadline_s: float
) -> None:
    coordinator = Coordinator(list(snapshots))
    monkeypatch.setattr(operators, "time", SimpleNamespace(monotonic=lambda: coordinator.now))
    operator = Operator(cast(Any, SimpleNamespace(coordinator=coordinator, members={member_id: None})), lambda line: None)
    monkeypatch.setattr(operator, "_stopping", SimpleNamespace(wait=lambda seconds: False))
    operator._empty(Operation(7, "remove", [member_id], deadline_s=deadline_s, force=True), member_id)
    assert not coordinator.snapshots
