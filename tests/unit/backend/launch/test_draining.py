"""When a draining member may be ended, and what a restarted coordinator is told again."""

import msgspec

from backend.coordinator.commands import Assign, Drain
from backend.fleet import Assignment, Draining, FleetSnapshot, Member, MemberKind, MemberState, MemberView, VerifierStats
from backend.launch.emptying import Emptying
from backend.launch.standing import Standing

MOVING = Draining(migrate=True)


def view(member_id: str, kind: MemberKind, state: MemberState = "ready", heard: float = 0.1, seen: int = 0, **stats: float):
    member = Member(member_id, kind, "i", "", "", "n", 1, "m", state)
    verifier = VerifierStats(member_id, 0.0, "sync", 4, **stats) if kind == "verifier" else None  # type: ignore[arg-type]
    return MemberView(member, heard, verifier, seen_version=seen)


def fleet(*views: MemberView, assignments: tuple[tuple[str, str], ...] = ()) -> FleetSnapshot:
    return FleetSnapshot(9, list(views), [Assignment(v, d, 1) for v, d in assignments], {})


def known(coordinator: str, *members: str, drain: Draining | None = None, pins: dict[str, list[str]] | None = None):
    """What a coordinator knows: `drain` is that of the first member."""
    views = [view(each, "drafter" if each.startswith("d") else "verifier") for each in members]
    views[:1] = [msgspec.structs.replace(each, drain=drain) for each in views[:1]]
    return FleetSnapshot(1, views, [], {}, pins=pins or {}, coordinator=coordinator)


def test_a_verifier_is_empty_when_its_gateways_know_and_it_has_twice_said_so_since() -> None:
    emptying = Emptying("v0", 7)

    def over(seen: int, wall: float, running: int = 0, waiting: int = 0) -> bool:
        verifier = view("v0", "verifier", "draining", running=running, waiting=waiting, busy_s=wall)
        return emptying.is_over(fleet(verifier, view("g0", "gateway", seen=seen), view("g1", "gateway", "lost")), 0.0)

    assert not over(seen=6, wall=1)
    assert not over(seen=6, wall=2)
    assert not over(seen=7, wall=2)
    assert not over(seen=7, wall=2)
    assert not over(seen=8, wall=3)
    assert not over(seen=8, wall=3)
    assert not over(seen=8, wall=4, running=1)
    assert not over(seen=8, wall=5, waiting=1)
    assert over(seen=8, wall=6)


def test_a_verifier_that_never_reported_is_not_taken_for_empty_but_one_that_is_gone_is() -> None:
    silent = MemberView(Member("v0", "verifier", "i", "", "", "n", 1, "m", "draining"), 0.1)
    assert not Emptying("v0", 1).is_over(fleet(silent), 0.0)
    assert Emptying("v0", 1).is_over(fleet(view("v0", "verifier", "lost")), 0.0)
    assert Emptying("v0", 1).is_over(fleet(), 0.0)


def test_requests_left_are_counted() -> None:
    assert Emptying("v0", 1).requests(fleet(view("v0", "verifier", running=2, waiting=3))) == 5
    assert Emptying("v0", 1).requests(fleet()) == 0


def test_a_drafter_is_free_when_every_verifier_has_been_told() -> None:
    emptying = Emptying("d0", 1)
    drafter = view("d0", "drafter", "draining")

    def over(now: float, heard: float, bound: bool) -> bool:
        verifiers = [view("v0", "verifier", heard=heard), view("v1", "verifier", "starting", heard=99)]
        return emptying.is_over(fleet(drafter, *verifiers, assignments=(("v0", "d0"),) if bound else ()), now)

    assert not over(0.0, 0.1, bound=True)
    assert not over(1.0, 0.1, bound=False)
    assert not over(1.1, 0.2, bound=False)
    assert over(1.3, 0.1, bound=False)


def test_drains_and_pins_are_repeated_when_their_members_are_back() -> None:
    standing = Standing()
    everyone = ("v0", "v1", "d0")
    assert standing.repeat(known("a", *everyone, drain=MOVING, pins={"d0": ["v1"]})) == []
    assert standing.repeat(known("a", *everyone, drain=MOVING, pins={"d0": ["v1"]})) == []
    assert standing.repeat(known("b")) == []
    assert standing.repeat(known("b", "v0", "d0")) == [Drain(member="v0", migrate=True, force=True)]
    assert standing.repeat(known("b", *everyone, drain=MOVING)) == [Assign(drafter="d0", verifiers=["v1"])]
    assert standing.repeat(known("b", *everyone, drain=MOVING, pins={"d0": ["v1"]})) == []
    # Forgotten twice, repeated twice; what was taken back meanwhile is not.
    assert standing.repeat(known("b", *everyone, drain=MOVING)) == []
    assert standing.repeat(known("c", *everyone)) == [Drain(member="v0", migrate=True, force=True)]


def test_a_coordinator_that_dies_before_the_repetition_took_effect_is_told_again() -> None:
    standing = Standing()
    standing.repeat(known("a", "v0", drain=MOVING))
    assert len(standing.repeat(known("b", "v0"))) == 1
    assert len(standing.repeat(known("c", "v0"))) == 1


def test_a_deadline_is_repeated() -> None:
    standing = Standing()
    standing.repeat(known("a", "v0", drain=Draining(migrate=False, deadline_s=40.0)))
    assert standing.repeat(known("b", "v0")) == [Drain(member="v0", deadline_s=40.0, force=True)]


def test_members_that_drain_of_themselves_are_their_own_affair() -> None:
    standing = Standing()
    standing.repeat(known("a", "v0", drain=Draining(migrate=True, ordered=False)))
    assert standing.repeat(known("b", "v0")) == []
