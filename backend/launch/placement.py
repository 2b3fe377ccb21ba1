"""Arranges a fleet's members in Ray placement groups, for clusters that we join.  Pure.

Each member is one bundle, all its tensor-parallel ranks included, and a bundle lies on one node.  Ray reserves a group's
bundles all at once or not at all.  It keeps them while members are restarted, so other users of the cluster cannot take a
restarting member's room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backend.launch.plan import MemberPlan

Placement = Literal["spread", "near", "free"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK"]

NEXT_TO_NOTHING = {"CPU": 0.01}
"""Bundle of a member that needs no resources: Ray refuses empty bundles."""


@dataclass(frozen=True)
class Group:
    """Members whose bundles are placed together."""

    strategy: Strategy
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


def arrange(members: Sequence[MemberPlan], placement: Placement) -> list[Group]:
    """Groups that hold every member exactly once.

    `spread`: one group over as many nodes as possible.  `near`: one group per verifier, on one node, with its share of the
    drafters; drafters are dealt to the verifiers in turn.  `free`: one group per member.
    """
    if not members:
        return []
    if placement == "spread":
        return [Group("SPREAD", tuple(members))]
    verifiers = [member for member in members if member.kind == "verifier"]
    if placement == "free" or not verifiers:
        return [Group("PACK", (member,)) for member in members]
    drafters = [member for member in members if member.kind != "verifier"]
    return [Group("STRICT_PACK", (verifier, *drafters[number :: len(verifiers)])) for number, verifier in enumerate(verifiers)]
