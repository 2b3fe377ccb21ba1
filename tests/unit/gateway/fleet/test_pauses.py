"""Pauses of all verifiers and of one, also when they are asked for at the same time."""

from gateway.fleet.pauses import Change, Pauses


def test_the_last_change_of_a_verifier_holds() -> None:
    pauses = Pauses()
    for change, holding in (
        (Change("a", True), {"a"}),
        (Change("a", False), set()),
        (Change(None, True), {"a", "b"}),
        (Change("b", False), {"a"}),
        (Change("b", True), {"a", "b"}),
        (Change(None, False), set()),
    ):
        pending = pauses.plus(change)
        pauses = pending.settled(change)
        for each in (pending, pauses):
            assert {name for name in "ab" if each.should_pause(name)} == holding
    assert pauses.changes == (change,)


def test_refused_pauses_are_undone_alone() -> None:
    first, second, third = Change(None, True), Change("a", True), Change("b", True)
    pauses = Pauses().plus(first).plus(second).plus(third)
    pauses = pauses.settled(second).without(third).without(first)
    assert pauses.changes == (second,)
    assert Pauses().plus(first).plus(again := Change(None, True)).settled(again).settled(first).changes == (again,)
