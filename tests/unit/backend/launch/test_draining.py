"""When a draining member may be ended."""

from backend.fleet import Assignment, FleetSnapshot, MemberKind, MemberState, MemberView, VerifierStats
from backend.launch.emptying import Emptying
from tests.support.fleet_story import member


def view(member_id: str, kind: MemberKind, state: MemberState = "ready", heard: float = 0.1, seen: int = 0, **stats: float):
    verifier = VerifierStats(member_id, 0.0, "sync", 4, **stats) if kind == "verifier" else None  # type: ignore[arg-type]
    return MemberView(member(member_id, kind, state), heard, verifier, seen_version=seen)


def fleet(*views: MemberView, assignments: tuple[tuple[str, str], ...] = ()) -> FleetSnapshot:
    return FleetSnapshot(9, list(views), [Assignment(v, d, 1) for v, d in assignments], {})


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


def test_a_verifier_that_is_not_known_or_never_reported_is_not_taken_for_empty_but_a_lost_one_is() -> None:
    silent = MemberView(member("v0", "verifier", "draining"), 0.1)
    for views, is_over in (([silent], False), ([view("v0", "verifier", "lost")], True), ([], False)):
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
