"""What an administrator is told of an operation that cannot be carried out, and what one leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from backend.coordinator.messages import Progress
from backend.fleet import FleetSnapshot, Operation, OperationKind
from backend.launch.operator import Operator


@pytest.mark.parametrize("kind", ["remove", "restart", "swap-drafter"])
def test_members_of_another_launcher_are_left_alone(kind: OperationKind) -> None:
    told: list[Progress] = []
    fleet = SimpleNamespace(coordinator=SimpleNamespace(progress=told.append), members={})
    operator = Operator(cast(Any, fleet), lambda line: None)
    operator._carry_out(Operation(7, kind, ["verifier-9"]))
    assert told[-1] == Progress(7, "failed", "verifier-9 is not one of this launcher's members")


def test_the_name_of_a_removed_member_is_free_of_its_drain() -> None:
    """`add` may use the name again."""
    fleet = Mock(members={"verifier-1": None})
    fleet.coordinator.snapshot.return_value = FleetSnapshot(1, [], [], {})
    Operator(fleet, lambda line: None)._carry_out(Operation(7, "remove", ["verifier-1"]))
    done = [(name, arguments[0]) for name, arguments, _ in fleet.mock_calls if name.endswith(("drain", "end", "resume"))]
    assert done == [("coordinator.drain", "verifier-1"), ("end", "verifier-1"), ("coordinator.resume", "verifier-1")]
