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
    for seen, wall, running, waiting, is_over in (
        (6, 1, 0, 0, False),
        (6, 2, 0, 0, False),
        (7, 2, 0, 0, False),
        (7, 2, 0, 0, False),
        (8, 3, 0, 0, False),
        (8, 3, 0, 0, False),
        (8, 4, 1, 0, False),
        (8, 5, 0, 2, False),
        (8, 6, 0, 0, True),
    ):
        verifier = view("v0", "verifier", "draining", running=running, waiting=waiting, busy_s=wall)
        snapshot = fleet(verifier, view("g0", "gateway", seen=seen), view("g1", "gateway", "lost"))
        assert emptying.is_over(snapshot, 0.0) == is_over, (seen, wall)
        assert emptying.requests(snapshot) == running + waiting


def test_a_verifier_that_never_reported_is_not_taken_for_empty_but_one_that_is_gone_is() -> None:
    silent = MemberView(Member("v0", "verifier", "i", "", "", "n", 1, "m", "draining"), 0.1)
    for views, is_over in (([silent], False), ([view("v0", "verifier", "lost")], True), ([], True)):
        assert Emptying("v0", 1).is_over(fleet(*views), 0.0) == is_over
    assert Emptying("v0", 1).requests(fleet()) == 0


def test_a_drafter_is_free_when_every_verifier_has_been_told() -> None:
    emptying = Emptying("d0", 1)
    for now, heard, bound, is_over in (
        (0.0, 0.1, True, False),
        (1.0, 0.1, False, False),
        (1.1, 0.2, False, False),
        (1.3, 0.1, False, True),
    ):
        verifiers = [view("v0", "verifier", heard=heard), view("v1", "verifier", "starting", heard=99)]
        snapshot = fleet(view("d0", "drafter", "draining"), *verifiers, assignments=(("v0", "d0"),) if bound else ())
        assert emptying.is_over(snapshot, now) == is_over, now


def test_drains_and_pins_are_repeated_when_their_members_are_back() -> None:
    standing, everyone, pins = Standing(), ("v0", "v1", "d0"), {"d0": ["v1"]}
    drain, pin = Drain(member="v0", migrate=True, force=True), Assign(drafter="d0", verifiers=["v1"])
    for snapshot, repeated in (
        (known("a", *everyone, drain=MOVING, pins=pins), []),
        (known("a", *everyone, drain=MOVING, pins=pins), []),
        (known("b"), []),
        (known("b", "v0", "d0"), [drain]),
        (known("b", *everyone, drain=MOVING), [pin]),
        (known("b", *everyone, drain=MOVING, pins=pins), []),
        # Forgotten twice, repeated twice; what was taken back meanwhile is not.
        (known("b", *everyone, drain=MOVING), []),
        (known("c", *everyone), [drain]),
        # A coordinator that dies before the repetition took effect is told again.
        (known("d", *everyone), [drain]),
        (known("d", *everyone, drain=Draining(migrate=False, deadline_s=40.0)), []),
        (known("e", *everyone), [Drain(member="v0", deadline_s=40.0, force=True)]),
        # Members that drain of themselves are their own affair.
        (known("e", *everyone, drain=Draining(migrate=True, ordered=False)), []),
        (known("f", *everyone), []),
    ):
        assert standing.repeat(snapshot) == repeated
