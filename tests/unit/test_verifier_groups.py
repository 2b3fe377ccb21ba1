"""Micro-batches stay level, keep everyone, and take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.verifier.groups import SMALLEST, Groups

EVENTS = st.lists(st.tuples(st.sampled_from(["add", "remove", "step", "one", "two"]), st.integers(0, 20)), max_size=80)


def everyone(groups: Groups) -> list[str]:
    return sorted([*groups.present(), *groups.others()])


@given(EVENTS)
def test_groups_are_level_and_lose_nobody(events: list[tuple[str, int]]) -> None:
    groups, alive, wanted = Groups(2), set(), 2
    for kind, n in events:
        name = f"r{n}"
        if kind == "add":
            groups.add(name)
            alive.add(name)
        elif kind == "remove":
            groups.remove(name)
            alive.discard(name)
        elif kind == "step":
            groups.stepped()
        else:
            wanted = 1 if kind == "one" else 2
            groups.want(wanted)
        assert everyone(groups) == sorted(alive)
        if wanted == 1 or len(alive) < 2 * SMALLEST:
            assert len(groups) == 1
        else:
            assert len(groups) == 2
            assert abs(len(groups.present()) - len(groups.others())) <= 1


@given(st.integers(2 * SMALLEST, 40))
def test_nobody_waits_for_more_than_one_turn(n: int) -> None:
    groups = Groups(2)
    for i in range(n):
        groups.add(f"r{i}")
    seen = set(groups.present())
    groups.stepped()
    assert seen.isdisjoint(groups.present())
    assert len(seen | set(groups.present())) == n
