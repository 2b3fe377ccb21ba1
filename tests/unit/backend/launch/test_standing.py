"""What a restarted coordinator is told again."""

from __future__ import annotations

from backend.coordinator.commands import Assign, Drain
from backend.fleet import Draining, FleetSnapshot, Member, MemberView
from backend.launch.standing import Standing


def fleet(coordinator: str, *members: str, drained: tuple[str, ...] = (), pins: dict[str, list[str]] | None = None):
    views = [
        MemberView(
            Member(each, "drafter" if each.startswith("d") else "verifier", "i", "", "", "n", 1, "m", "ready"),
            0.1,
            drain=Draining(migrate=True) if each in drained else None,
        )
        for each in members
    ]
    return FleetSnapshot(1, views, [], {}, pins=pins or {}, coordinator=coordinator)


def test_drains_and_pins_are_repeated_when_their_members_are_back() -> None:
    standing = Standing()
    everyone = ("v0", "v1", "d0")
    assert standing.repeat(fleet("a", *everyone, drained=("v0",), pins={"d0": ["v1"]})) == []
    assert standing.repeat(fleet("a", *everyone, drained=("v0",), pins={"d0": ["v1"]})) == []
    assert standing.repeat(fleet("b")) == []
    assert standing.repeat(fleet("b", "v0", "d0")) == [Drain(member="v0", migrate=True, force=True)]
    assert standing.repeat(fleet("b", *everyone, drained=("v0",))) == [Assign(drafter="d0", verifiers=["v1"])]
    assert standing.repeat(fleet("b", *everyone, drained=("v0",), pins={"d0": ["v1"]})) == []
    # Forgotten twice, repeated twice; what was taken back meanwhile is not.
    assert standing.repeat(fleet("b", *everyone, drained=("v0",))) == []
    assert standing.repeat(fleet("c", *everyone)) == [Drain(member="v0", migrate=True, force=True)]


def test_a_coordinator_that_dies_before_the_repetition_took_effect_is_told_again() -> None:
    standing = Standing()
    standing.repeat(fleet("a", "v0", drained=("v0",)))
    assert len(standing.repeat(fleet("b", "v0"))) == 1
    assert len(standing.repeat(fleet("c", "v0"))) == 1


def test_a_deadline_is_repeated() -> None:
    standing = Standing()
    view = fleet("a", "v0").members[0]
    draining = MemberView(view.member, 0.1, drain=Draining(migrate=False, deadline_s=40.0))
    standing.repeat(FleetSnapshot(1, [draining], [], {}, coordinator="a"))
    assert standing.repeat(fleet("b", "v0")) == [Drain(member="v0", deadline_s=40.0, force=True)]


def test_members_that_drain_of_themselves_are_their_own_affair() -> None:
    standing = Standing()
    view = fleet("a", "v0").members[0]
    leaving = MemberView(view.member, 0.1, drain=Draining(migrate=True, ordered=False))
    standing.repeat(FleetSnapshot(1, [leaving], [], {}, coordinator="a"))
    assert standing.repeat(fleet("b", "v0")) == []
