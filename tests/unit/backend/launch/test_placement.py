"""Which members share a placement group, and who moves into a room that became vacant."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from backend.fleet import MemberKind
from backend.launch import rooms
from backend.launch.plan import LaunchError, MemberPlan
from backend.launch.rooms import Group, ReservedBundles, arrange, fits, needs


def member(name: str, cpus: float = 1, gpus: float = 0, **resources: float) -> MemberPlan:
    kind: MemberKind = "verifier" if name.startswith("verifier") else "drafter"
    return MemberPlan(name, kind, [], cpus, gpus, "tcp://node:0", resources=resources)


def fleet(verifiers: int, drafters: int) -> list[MemberPlan]:
    return [member(f"verifier-{i}") for i in range(verifiers)] + [member(f"drafter-{i}") for i in range(drafters)]


def names(groups: list[Group]) -> list[tuple[str, list[str]]]:
    return [(group.strategy, [each.member_id for each in group.members]) for group in groups]


def test_spread_is_one_group_over_all_nodes_and_near_a_node_per_verifier_and_its_drafters() -> None:
    assert names(arrange(fleet(1, 2), "spread")) == [("SPREAD", ["verifier-0", "drafter-0", "drafter-1"])]
    assert names(arrange(fleet(2, 3), "near")) == [
        ("STRICT_PACK", ["verifier-0", "drafter-0", "drafter-2"]),
        ("STRICT_PACK", ["verifier-1", "drafter-1"]),
    ]


@given(st.integers(1, 6), st.integers(0, 9), st.sampled_from(["spread", "near", "free"]))
def test_everybody_is_in_one_group(verifiers: int, drafters: int, placement: Any) -> None:
    members = fleet(verifiers, drafters)
    placed = [each.member_id for group in arrange(members, placement) for each in group.members]
    assert sorted(placed) == sorted(each.member_id for each in members)


def test_all_ranks_of_a_verifier_are_one_bundle_and_a_vacant_one_is_for_those_who_need_no_more() -> None:
    assert needs(member("verifier-0", cpus=0, gpus=4, big=0.5)) == {"GPU": 4, "big": 0.5}
    assert needs(member("drafter-0", cpus=0)) == {"CPU": 0.01}, "Ray takes no empty bundle"
    cases: list[tuple[dict[str, float], dict[str, float], bool]] = [
        ({"gpus": 1}, {"GPU": 4}, True),
        ({}, {"GPU": 4}, True),
        ({"gpus": 4}, {"GPU": 1}, False),
        ({"gpus": 1, "big": 1}, {"GPU": 1}, False),
    ]
    for wants, bundle, is_enough in cases:
        assert fits(member("verifier-1", cpus=0, **wants), bundle) == is_enough


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray as far as rooms are concerned: `made` groups, of which some were `removed`; `room` for more or not."""
    state = SimpleNamespace(made=[], removed=[], room=True)

    def make(bundles: list[dict[str, float]], strategy: str) -> Mock:
        state.made.append(Mock(bundles=bundles, strategy=strategy, wait=Mock(return_value=state.room)))
        return state.made[-1]

    monkeypatch.setattr(rooms, "placement_group", make)
    monkeypatch.setattr(rooms, "remove_placement_group", state.removed.append)
    monkeypatch.setattr(rooms, "_no_room", lambda group: f"no room for {group}")
    monkeypatch.setattr(
        rooms,
        "PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index, **_: (group, placement_group_bundle_index),
    )
    return state


def test_a_member_that_comes_again_has_its_room_and_a_new_one_takes_a_vacant_one(cluster: SimpleNamespace) -> None:
    reserved = ReservedBundles()
    members = fleet(1, 2)
    reserved.reserve(arrange(members, "spread"))
    (whole,) = cluster.made
    assert [reserved.place(each) for each in members] == [(whole, 0), (whole, 1), (whole, 2)]
    assert reserved.place(members[1]) == (whole, 1)
    reserved.vacate("drafter-0")
    assert reserved.place(member("drafter-7")) == (whole, 1)
    own, number = reserved.place(member("drafter-8"))
    assert (own, number) == (cluster.made[1], 0)
    assert not cluster.removed


def test_a_group_without_members_is_given_back(cluster: SimpleNamespace) -> None:
    reserved = ReservedBundles()
    reserved.reserve(arrange(fleet(2, 2), "near"))
    reserved.vacate("verifier-0")
    assert cluster.removed == []
    reserved.vacate("drafter-0")
    assert cluster.removed == cluster.made[:1]
    reserved.close()
    assert cluster.removed == cluster.made
    # Room that is only asked about is given back, and so is some where there is none for all.
    reserved, wide = ReservedBundles(), member("verifier-1", cpus=0, gpus=1)
    reserved.check(wide)
    assert cluster.made[-1].bundles == [{"GPU": 1}]
    cluster.room = False
    with pytest.raises(LaunchError, match="no room"):
        reserved.check(wide)
    with pytest.raises(LaunchError, match=r"no room for verifier-0 \(1 CPU\), drafter-0 \(1 CPU\)"):
        reserved.reserve(arrange(fleet(2, 2), "near"))
    assert (cluster.removed, len(cluster.made)) == (cluster.made, 6)
