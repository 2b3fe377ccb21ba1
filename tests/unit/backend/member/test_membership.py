"""A member that is told to end drains first."""

import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from backend.fleet import Member, Orders
from backend.member import departure
from backend.member.departure import depart_on_sigterm
from backend.member.membership import Membership


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
