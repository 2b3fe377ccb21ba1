"""A member that starts while the coordinator is away waits for it."""

import threading
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest

from backend.coordinator.messages import CoordinatorUnavailable
from backend.fleet import Member
from backend.member import membership
from backend.member.membership import Membership, enter
from backend.transport import ServerKeys

KEYS = ServerKeys("public", "secret")
MEMBER = Member("v0", "verifier", "one", "ipc://v0", "", "here", 1, "demo")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY_S", 0.0)


def test_a_starting_member_waits_until_the_coordinator_is_back() -> None:
    coordinator = Mock()
    coordinator.register.side_effect = [CoordinatorUnavailable("restarting")] * 5 + [KEYS]
    assert enter(coordinator, MEMBER) == KEYS
    assert coordinator.register.call_args_list == [call(MEMBER)] * 6


def test_it_does_not_wait_for_ever() -> None:
    coordinator = Mock()
    coordinator.register.side_effect = CoordinatorUnavailable("restarting")
    with pytest.raises(CoordinatorUnavailable):
        enter(coordinator, MEMBER, limit_s=0.05)
    assert coordinator.register.call_count > 1


def test_of_two_changes_at_once_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Membership(Mock(), MEMBER, lambda: None, lambda orders: None)
    other = threading.Thread(target=changing.become, args=("ready",))
    replace = msgspec.structs.replace

    def slowly(member: Member, **fields: Any) -> Member:
        changed = replace(member, **fields)
        if "head" in fields:
            other.start()
            # Enough for a change that need not wait.
            other.join(0.2)
        return changed

    monkeypatch.setattr(msgspec.structs, "replace", slowly)
    changing.take_head("/head", True)
    other.join()
    assert (changing._member.head, changing._member.state) == ("/head", "ready")


def test_a_head_swapped_in_again_is_told_to_verifiers() -> None:
    """Its directory may have been written anew."""
    membership = Membership(Mock(), MEMBER, lambda: None, lambda orders: None)
    membership.take_head("/head", True)
    before = membership._member
    membership.take_head("/head", True)
    assert membership._member.route != before.route
