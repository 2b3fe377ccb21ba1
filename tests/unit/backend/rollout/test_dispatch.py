"""The dispatcher: every request has exactly one owner, longest first, to whoever has the least left to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.rollout.dispatch import Dispatcher
from tests.support.properties import examples

WINDOW = 3


class Fleet(RuleBasedStateMachine):
    """Workers come and go, requests end and are given up, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = [5, 1, 9, 9, 2, 7, 3, 8, 1, 4, 6, 2]
        self.dispatcher = Dispatcher(self.expected, WINDOW)
        self.running: dict[str, set[int]] = {}
        self.done: set[int] = set()

    @rule(worker=st.sampled_from(["a", "b", "c"]))
    def join(self, worker: str) -> None:
        if worker not in self.running:
            self.dispatcher.join(worker)
            self.running[worker] = set()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.running)))
        assert self.dispatcher.leave(worker) == sorted(self.running.pop(worker))

    @rule()
    def assign(self) -> None:
        owned = set().union(*self.running.values(), self.done)
        for request, worker in self.dispatcher.assign():
            assert request not in owned, "one owner at a time"
            owned.add(request)
            self.running[worker].add(request)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(w for w, r in self.running.items() if r)))
        request = data.draw(st.sampled_from(sorted(self.running[worker])))
        self.running[worker].remove(request)
        if again:
            self.dispatcher.again(request, worker)
        else:
            self.dispatcher.done(request, worker)
            self.done.add(request)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.dispatcher.unfinished == len(self.expected) - len(self.done)
        assert all(len(requests) <= WINDOW for requests in self.running.values())

    def teardown(self) -> None:
        self.join("z")
        while self.dispatcher.unfinished:
            self.assign()
            for worker in sorted(self.running):
                for request in sorted(self.running[worker]):
                    self.dispatcher.done(request, worker)
                    self.done.add(request)
                self.running[worker].clear()
        assert self.done == set(range(len(self.expected)))


TestFleet = Fleet.TestCase
TestFleet.settings = examples(30)


def test_longest_first_and_level() -> None:
    dispatcher = Dispatcher([1, 10, 4, 7, 2, 6], 10)
    dispatcher.join("a")
    dispatcher.join("b")
    assert dispatcher.assign() == [(1, "a"), (3, "b"), (5, "b"), (2, "a"), (4, "b"), (0, "a")]
    assert (dispatcher.load("a"), dispatcher.load("b")) == (15, 15)


@given(st.integers(1, 40), st.integers(1, 4))
def test_equal_requests_go_to_whoever_has_the_fewest(requests: int, workers: int) -> None:
    dispatcher = Dispatcher([100] * requests, 100)
    names = [f"w{number}" for number in range(workers)]
    for name in names:
        dispatcher.join(name)
    dispatcher.assign()
    loads = [dispatcher.load(name) // 100 for name in names]
    assert sum(loads) == requests
    assert max(loads) - min(loads) <= 1
