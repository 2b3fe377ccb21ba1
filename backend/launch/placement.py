"""Which members of a fleet share one of Ray's placement groups, and what each needs.  Pure; for clusters that we join.

A bundle of a group lies on one node, and a member, all its tensor-parallel ranks included, is one bundle.  Ray reserves a
group's bundles all at once or not at all, and keeps them while members are restarted, so a cluster that others use too does not
take a member's room while it is away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backend.launch.plan import MemberPlan

Placement = Literal["spread", "near", "free"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK"]

NEXT_TO_NOTHING = {"CPU": 0.01}
"""A bundle must hold something."""


@dataclass(frozen=True)
class Group:
    """Members whose bundles are placed together."""

    strategy: Strategy
    members: tuple[MemberPlan, ...]

    def __str__(self) -> str:
        return ", ".join(f"{member.member_id} ({text(needs(member))})" for member in self.members)


def needs(member: MemberPlan) -> dict[str, float]:
    """What a member takes of its node, as Ray names it."""
    wanted = {"CPU": float(member.num_cpus), "GPU": float(member.num_gpus), **member.resources}
    return {name: amount for name, amount in wanted.items() if amount} or dict(NEXT_TO_NOTHING)


def text(resources: dict[str, float]) -> str:
    """`2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def fits(member: MemberPlan, bundle: dict[str, float]) -> bool:
    """Whether a member can run in the room that was another one's."""
    return all(amount <= bundle.get(name, 0.0) for name, amount in needs(member).items() if amount > NEXT_TO_NOTHING["CPU"])


def arrange(members: Sequence[MemberPlan], placement: Placement) -> list[Group]:
    """Every member is in exactly one group.

    `spread`: one group over as many nodes as possible.  `near`: a group per verifier, on one node, with its share of the
    drafters, dealt out in turn.  `free`: each by itself.
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
