"""A fleet's Ray placement groups in a cluster that it joined, and which member is in which bundle.

Each member is one bundle, all its tensor-parallel ranks included, and a bundle lies on one node.  Ray reserves a group's
bundles all at once or not at all.  It keeps them while members are restarted, so other users of the cluster cannot take a
restarting member's room.

The launcher's process: the main thread until the fleet serves, then the operator's thread, at the end the main thread again.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import ray
import ray.exceptions
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backend.launch.plan import LaunchError, MemberPlan

RESERVE_TIMEOUT_S = 20.0
"""Seconds.  Ray places a group that fits in well under one second, and tries for ever to place one that does not."""
CHECK_TIMEOUT_S = 5.0
NEXT_TO_NOTHING = {"CPU": 0.01}
"""Bundle of a member that needs no resources: Ray refuses empty bundles."""


@dataclass(frozen=True)
class Group:
    """Members whose bundles are placed together."""

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"]
    members: tuple[MemberPlan, ...]

    def __str__(self) -> str:
        return ", ".join(f"{member.member_id} ({text(needs(member))})" for member in self.members)


def needs(member: MemberPlan) -> dict[str, float]:
    """The resources that a member takes of its node, by Ray's names; never empty."""
    wanted = {"CPU": float(member.num_cpus), "GPU": float(member.num_gpus), **member.resources}
    return {name: amount for name, amount in wanted.items() if amount} or dict(NEXT_TO_NOTHING)


def text(resources: dict[str, float]) -> str:
    """Resources for messages, such as `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def fits(member: MemberPlan, bundle: dict[str, float]) -> bool:
    """Whether a member can run in `bundle`, the room of a member that was removed."""
    return all(amount <= bundle.get(name, 0.0) for name, amount in needs(member).items() if amount > NEXT_TO_NOTHING["CPU"])


def arrange(members: Sequence[MemberPlan], placement: Literal["spread", "near", "free"]) -> list[Group]:
    """Groups that hold every member exactly once; there is a verifier among them.

    `spread`: one group over as many nodes as possible.  `near`: one group per verifier, on one node, with its share of the
    drafters; drafters are dealt to the verifiers in turn.  `free`: one group per member.
    """
    if placement == "spread":
        return [Group("SPREAD", tuple(members))]
    if placement == "free":
        return [Group("PACK", (member,)) for member in members]
    verifiers = [member for member in members if member.kind == "verifier"]
    drafters = [member for member in members if member.kind != "verifier"]
    return [Group("STRICT_PACK", (verifier, *drafters[number :: len(verifiers)])) for number, verifier in enumerate(verifiers)]


@dataclass
class _Room:
    """One bundle of a placement group."""

    group: Any
    number: int
    bundle: dict[str, float]
    occupant: str | None
    """The member in it; None after it was removed."""


class ReservedBundles:
    """The reserved bundles of a joined cluster, one per member."""

    def __init__(self) -> None:
        self._rooms: list[_Room] = []

    def reserve(self, groups: Sequence[Group], timeout_s: float = RESERVE_TIMEOUT_S) -> None:
        """Reserves all these groups; raises `LaunchError`, and reserves none, when one does not fit."""
        made: list[Any] = []
        try:
            for group in groups:
                made.append(placement_group([needs(member) for member in group.members], strategy=group.strategy))
            for group, handle in zip(groups, made, strict=True):
                if not handle.wait(timeout_s):
                    raise LaunchError(_no_room(group))
        except BaseException:
            _remove(made)
            raise
        for group, handle in zip(groups, made, strict=True):
            self._rooms += [_Room(handle, i, needs(member), member.member_id) for i, member in enumerate(group.members)]

    def check(self, member: MemberPlan) -> None:
        """Raises `LaunchError` if Ray has no room for one more such member; reserves nothing."""
        self.reserve([Group("PACK", (member,))], CHECK_TIMEOUT_S)
        self.vacate(member.member_id)

    def place(self, member: MemberPlan) -> Any:
        """The scheduling strategy that starts a member in its bundle.

        A member without a bundle takes the first vacant one that is large enough, or a new one.  Raises `LaunchError`.
        """
        own = (each for each in self._rooms if each.occupant == member.member_id)
        vacant = (each for each in self._rooms if each.occupant is None and fits(member, each.bundle))
        room = next(chain(own, vacant), None)
        if room is None:
            self.reserve([Group("PACK", (member,))])
            room = self._rooms[-1]
        room.occupant = member.member_id
        return PlacementGroupSchedulingStrategy(
            room.group, placement_group_bundle_index=room.number, placement_group_capture_child_tasks=False
        )

    def vacate(self, member_id: str) -> None:
        """Frees the bundle of a removed member.  A group without members is given back to the cluster."""
        for room in self._rooms:
            if room.occupant == member_id:
                room.occupant = None
        inhabited = {room.group for room in self._rooms if room.occupant is not None}
        _remove({room.group for room in self._rooms} - inhabited)
        self._rooms = [room for room in self._rooms if room.group in inhabited]

    def close(self) -> None:
        _remove({room.group for room in self._rooms})
        self._rooms.clear()


def _remove(groups: Iterable[Any]) -> None:
    for group in groups:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            remove_placement_group(group)


def _no_room(group: Group) -> str:
    """Why Ray could not place a group: what it needs, and what each node has free."""
    free = ray._private.state.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            there = {name: amount for name, amount in free.get(node["NodeID"], {}).items() if _counts(name)}
            over = " over all its GPUs" if "GPU" in there else ""
            nodes.append(f"{node['NodeManagerAddress']} has {text(there) or 'nothing'} free{over}")
    together = " on one node" if group.strategy == "STRICT_PACK" and len(group.members) > 1 else ""
    return f"the Ray cluster has no room for {group}{together}: {'; '.join(nodes)}"


def _counts(name: str) -> bool:
    """Whether a resource is worth showing: Ray's memory, node and placement-group entries are not."""
    return not name.startswith(("node:", "memory", "object_store_memory")) and "_group_" not in name
