"""A member that is told to end drains first."""

from __future__ import annotations

import signal
import threading
from typing import cast

import pytest

from backend.fleet import Member, Orders
from backend.member import departure
from backend.member import membership as membership_module
from backend.member.departure import Departure
from backend.member.membership import Membership


class Coordinator:
    def __init__(self) -> None:
        self.states: list[str] = []
        self.reported = threading.Condition()

    def register(self, member: Member) -> None:
        pass

    def deregister(self, member_id: str, incarnation: str) -> None:
        pass

    def report(self, member_id: str, incarnation: str, stats: object, state: str) -> Orders:
        with self.reported:
            self.states.append(state)
            self.reported.notify_all()
        return Orders(known=True)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(departure, "POLL_S", 0.005)
    monkeypatch.setattr(departure, "SETTLED_S", 0.05)
    coordinator = Coordinator()
    identity = Member("v0", "verifier", "i", "ipc:///x", "", "n", 1, "m", "ready")
    membership = Membership(
        cast(membership_module.Coordinator, coordinator),
        identity,
        lambda: None,
        lambda orders: membership.drain(orders.drain),
        0.005,
    )
    membership.join_fleet()
    yield coordinator, membership
    membership.leave_fleet()


def test_sigterm_drains_waits_for_the_last_request_and_ends(member) -> None:
    coordinator, membership = member
    busy, stopped, ended = threading.Event(), threading.Event(), threading.Event()
    busy.set()
    leaving = Departure(membership, lambda: not busy.is_set(), stopped.set, 60.0)
    leaving._exit = lambda status: ended.set()
    before = signal.getsignal(signal.SIGTERM)
    try:
        leaving.on_sigterm()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    with coordinator.reported:
        assert coordinator.reported.wait_for(lambda: coordinator.states[-1:] == ["draining"], 30)
        count = len(coordinator.states)
        # Orders to the contrary do not change its mind, and it is still there: it has work.
        assert coordinator.reported.wait_for(lambda: len(coordinator.states) > count + 20, 30)
        assert set(coordinator.states[count:]) == {"draining"}
    assert not stopped.is_set()
    busy.clear()
    assert ended.wait(30)
    assert stopped.is_set()


def test_it_does_not_wait_for_ever(member) -> None:
    _, membership = member
    ended = threading.Event()
    leaving = Departure(membership, lambda: False, lambda: None, 0.05)
    leaving._exit = lambda status: ended.set()
    leaving.begin()
    assert ended.wait(30)


def test_off_the_main_thread_nothing_changes(member) -> None:
    _, membership = member
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=Departure(membership, lambda: True, lambda: None, 1.0).on_sigterm)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
