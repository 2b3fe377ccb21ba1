"""A member that starts while the coordinator is away waits for it; one that is told to end drains first."""

import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest

from backend.coordinator.messages import CoordinatorUnavailable
from backend.fleet import Member, Orders
from backend.member import departure
from backend.member.departure import depart_on_sigterm
from backend.member.membership import Membership, enter
from backend.transport import ServerKeys


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(departure, "POLL_S", 0.005)
    monkeypatch.setattr(departure, "SETTLED_S", 0.05)
    coordinator = Mock(states=[], reported=threading.Condition())

    def report(member_id: str, incarnation: str, stats: object, state: str) -> Orders:
        with coordinator.reported:
            coordinator.states.append(state)
            coordinator.reported.notify_all()
        return Orders(known=True)

    coordinator.report = report
    identity = Member("v0", "verifier", "i", "ipc:///x", "", "n", 1, "m", "ready")
    membership = Membership(coordinator, identity, lambda: None, lambda orders: membership.drain(orders.drain), 0.005)
    membership.join_fleet()
    yield coordinator, membership
    membership.leave_fleet()


@pytest.fixture
def handler() -> Iterator[Any]:
    """SIGTERM's handler, which is restored after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield before
    signal.signal(signal.SIGTERM, before)


def test_sigterm_drains_waits_for_the_last_request_and_ends(member, handler) -> None:
    coordinator, membership = member
    busy, stopped, ended = threading.Event(), threading.Event(), threading.Event()
    busy.set()
    depart_on_sigterm(membership, lambda: not busy.is_set(), stopped.set, 60.0, lambda status: ended.set())
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    with coordinator.reported:
        assert coordinator.reported.wait_for(lambda: coordinator.states[-1:] == ["draining"], 120)
        count = len(coordinator.states)
        # Orders to the contrary do not change its mind, and it is still there: it has work.
        assert coordinator.reported.wait_for(lambda: len(coordinator.states) > count + 20, 120)
        assert set(coordinator.states[count:]) == {"draining"}
    assert not stopped.is_set()
    busy.clear()
    assert ended.wait(120)
    assert stopped.is_set()


def test_it_does_not_wait_for_ever(member, handler) -> None:
    _, membership = member
    ended = threading.Event()
    depart_on_sigterm(membership, lambda: False, lambda: None, 0.05, lambda status: ended.set())
    signal.raise_signal(signal.SIGTERM)
    assert ended.wait(120)


def test_off_the_main_thread_nothing_changes(member, handler) -> None:
    _, membership = member
    thread = threading.Thread(target=depart_on_sigterm, args=(membership, lambda: True, lambda: None, 1.0))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler


KEYS = ServerKeys("public", "secret")
MEMBER = Member("v0", "verifier", "one", "ipc://v0", "", "here", 1, "demo")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.member.membership.RETRY_S", 0.0)


def test_a_starting_member_waits_until_the_coordinator_is_back() -> None:
    coordinator = Mock()
    coordinator.register.side_effect = [CoordinatorUnavailable("restarting")] * 5 + [KEYS]
    assert enter(coordinator, MEMBER) == KEYS
    assert coordinator.register.call_args_list == [call(MEMBER)] * 6


def test_a_starting_member_does_not_wait_for_ever() -> None:
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
