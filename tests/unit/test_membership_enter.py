"""A member that starts while the coordinator is away waits for it."""

from __future__ import annotations

import pytest

from backend.coordinator.messages import CoordinatorUnavailable
from backend.fleet import Member
from backend.member import membership
from backend.member.membership import enter
from backend.transport import ServerKeys

KEYS = ServerKeys("public", "secret")
MEMBER = Member("v0", "verifier", "one", "ipc://v0", "", "here", 1, "demo")


class Away:
    """Cannot be reached the first few times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.asked = 0

    def register(self, member: Member) -> ServerKeys:
        assert member is MEMBER
        self.asked += 1
        if self.asked <= self.times:
            raise CoordinatorUnavailable("restarting")
        return KEYS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY_S", 0.0)


def test_a_starting_member_waits_until_the_coordinator_is_back() -> None:
    coordinator = Away(5)
    assert enter(coordinator, MEMBER) == KEYS  # type: ignore[arg-type]
    assert coordinator.asked == 6


def test_it_does_not_wait_for_ever() -> None:
    coordinator = Away(10**9)
    with pytest.raises(CoordinatorUnavailable):
        enter(coordinator, MEMBER, limit_s=0.05)  # type: ignore[arg-type]
    assert coordinator.asked > 1
