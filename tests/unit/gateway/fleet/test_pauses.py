"""Pauses that are asked for at the same time."""

from gateway.fleet.pauses import Changes, Pauses


def test_refused_pauses_are_undone_alone() -> None:
    changes = Changes()
    first, now = changes.begin(Pauses(), None, True)
    second, now = changes.begin(now, "a", True)
    third, now = changes.begin(now, "b", True)
    now = changes.end(second, now, refused=False)
    now = changes.end(third, now, refused=True)
    now = changes.end(first, now, refused=True)
    assert now == Pauses().after("a", True)
