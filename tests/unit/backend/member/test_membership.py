"""A member that starts while the coordinator is away registers when it is back; one that is told to end drains first."""

import signal
import threading
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest

from backend.coordinator.messages import CoordinatorUnavailable
from backend.coordinator.policy import Coordinator
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


def test_it_does_not_wait_for_ever_and_off_the_main_thread_nothing_changes(member, handler) -> None:
    _, membership = member
    ended = threading.Event()
    given = (membership, lambda: False, lambda: None, 0.05, lambda status: ended.set())
    thread = threading.Thread(target=depart_on_sigterm, args=given)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler
    depart_on_sigterm(*given)
    signal.raise_signal(signal.SIGTERM)
    assert ended.wait(120)


MEMBER = Member("v0", "verifier", "one", "ipc://v0", "", "here", 1, "demo")


def test_a_starting_member_registers_as_soon_as_the_coordinator_is_back() -> None:
    registered = threading.Event()
    coordinator = Mock(register=Mock(side_effect=lambda member: registered.set()))
    away = CoordinatorUnavailable("restarting")
    coordinator.report.side_effect = chain([away] * 5, repeat(Orders(known=False)))
    membership = Membership(coordinator, MEMBER, lambda: None, lambda orders: None, 0.0)
    membership.join_fleet()
    assert registered.wait(120)
    membership.leave_fleet()
    assert coordinator.register.call_args == call(MEMBER)
    assert coordinator.report.call_count > 5


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
    monkeypatch.undo()
    before = changing._member
    assert (before.head, before.state) == ("/head", "ready")
    changing.take_head("/head", True)
    assert changing._member.route != before.route, "verifiers are told: its directory may have been written anew"


def test_a_member_is_never_ready_at_an_address_at_which_it_does_not_listen() -> None:
    """Gateways would connect there, and stay connected."""
    policy, starting, ready = Coordinator(), threading.Event(), threading.Event()
    seen: list[tuple[str, str]] = []

    def called(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            answer = method(*arguments, now=0.0)
            seen.extend((view.member.state, view.member.address) for view in policy.snapshot(0.0).members)
            for state, event in (("starting", starting), ("ready", ready)):
                if any(each[0] == state for each in seen):
                    event.set()
            return answer

        return call

    coordinator = Mock(report=called(policy.report), register=called(policy.register))
    identity = Member("v0", "verifier", "i", "tcp://n:0", "", "n", 1, "m")
    membership = Membership(coordinator, identity, lambda: None, lambda orders: membership.drain(orders.drain), 0.005)
    membership.join_fleet()
    assert starting.wait(120)
    membership.become("ready", "tcp://n:7")
    assert ready.wait(120)
    membership.leave_fleet()
    assert ("ready", "tcp://n:0") not in seen
