"""What an administrator is told of an operation that cannot be carried out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.coordinator.messages import Progress
from backend.fleet import Operation, OperationKind
from backend.launch.operator import Operator


@pytest.mark.parametrize("kind", ["remove", "restart", "swap-drafter"])
def test_members_of_another_launcher_are_left_alone(kind: OperationKind) -> None:
    told: list[Progress] = []
    fleet = SimpleNamespace(coordinator=SimpleNamespace(progress=told.append), members={})
    operator = Operator(cast(Any, fleet), lambda line: None)
    operator._carry_out(Operation(7, kind, ["verifier-9"]))
    assert told[-1] == Progress(7, "failed", "verifier-9 is not one of this launcher's members")
