"""The queue in front of verifiers: bounds, order, shares, and nobody left behind."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.fleet import VerifierStats
from gateway.admission.queue import FairQueue, Item
from gateway.admission.room import Rooms
from tests.support.properties import examples


def item(flow="a", tokens=100, weight=1.0, priority=1, sequences=1):
    return Item(flow, weight, priority, sequences, tokens)


def wide(*items: Item) -> FairQueue[Item]:
    """A queue in which there is always room, with these."""
    queue: FairQueue[Item] = FairQueue(10**6, 10**9)
    for each in items:
        queue.push(each)
    return queue


items = st.builds(
    item,
    flow=st.sampled_from("abcd"),
    tokens=st.integers(1, 500),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    priority=st.integers(0, 2),
    sequences=st.integers(1, 6),
)
steps = st.lists(st.one_of(items, st.sampled_from(["pop", "remove", "settle"])), max_size=80)


@given(steps, st.integers(1, 12), st.integers(1, 1500))
def test_bounds_order_and_counts_hold_whatever_happens(what, max_sequences, max_tokens):
    queue: FairQueue[Item] = FairQueue(max_sequences, max_tokens)
    waiting: list[Item] = []
    for now, step in enumerate(what):
        if isinstance(step, Item):
            # One object is one request.
            each = item(step.flow, step.tokens, step.weight, step.priority, step.sequences)
            waiting.append(each)
            for shed in queue.push(each):
                waiting.remove(shed)
        elif step == "pop":
            best = min((each.priority for each in waiting), default=None)
            popped = queue.pop(float(now))
            assert (popped is None) == (best is None)
            if popped is not None:
                assert popped.priority == best
                mine = [each for each in waiting if (each.flow, each.priority) == (popped.flow, popped.priority)]
                assert mine[0] is popped, "a flow's requests keep their order"
                waiting.remove(popped)
        elif step == "remove" and waiting:
            queue.remove(waiting.pop(len(waiting) // 2))
        elif step == "settle":
            queue.settle("a", 1.0, 1, (-1) ** now * 37)
        assert len(queue) == len(waiting)
        assert queue.sequences == sum(each.sequences for each in waiting)
        assert queue.tokens == sum(each.tokens for each in waiting)
        assert len(waiting) <= 1 or (queue.sequences <= max_sequences and queue.tokens <= max_tokens)
    assert set(map(id, iter(lambda: queue.pop(0.0), None))) == set(map(id, waiting))
    assert (queue.sequences, queue.tokens) == (0, 0)


sixty_sizes = st.lists(st.integers(1, 300), min_size=60, max_size=60)


@examples(50)
@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 5.0]), sixty_sizes), min_size=2, max_size=4), st.integers(10, 60))
def test_flows_that_wait_get_tokens_by_their_weights(flows, served):
    """Start-time fair queueing's bound: between any two backlogged flows, one longest request of each."""
    queue = wide(*(item(str(flow), tokens, weight) for flow, (weight, sizes) in enumerate(flows) for tokens in sizes))
    taken = [0.0] * len(flows)
    left = [60] * len(flows)
    for now in range(served):
        popped = queue.pop(float(now))
        assert popped is not None
        taken[int(popped.flow)] += popped.tokens / popped.weight
        left[int(popped.flow)] -= 1
        if not all(left):
            break
        for (a, (weight_a, sizes_a)), (b, (weight_b, sizes_b)) in itertools.combinations(enumerate(flows), 2):
            assert abs(taken[a] - taken[b]) <= max(sizes_a) / weight_a + max(sizes_b) / weight_b + 1e-6


@given(st.integers(1, 200), st.floats(0.01, 1.0), st.integers(1, 500))
def test_nobody_starves_behind_a_flood(tokens, weight, flood):
    """However many come of another key, and go on coming: the wait is bounded by what is owed to the others until then."""
    mine = item("mine", tokens, weight)
    queue = wide(*(item("flood", flood, 1.0) for _ in range(50)), item("mine", tokens, weight), mine)
    for now in range(10**5):
        queue.push(item("flood", flood, 1.0))
        if queue.pop(float(now)) is mine:
            break
        assert now * flood <= 2 * tokens / weight + 2 * flood
    else:
        pytest.fail("never served")


def test_who_was_away_has_saved_nothing_up_and_what_a_flow_gets_back_does_not_change_its_order():
    queue = wide(*(item("old") for _ in range(40)))
    for now in range(20):
        queue.pop(float(now))
    for _ in range(20):
        queue.push(item("new"))
    following = [queue.pop(20.0) for _ in range(10)]
    assert 4 <= sum(each is not None and each.flow == "new" for each in following) <= 6
    mine = [item("a"), item("a"), item("a", 1)]
    queue = wide(*mine[:2])
    queue.settle("a", 1.0, 1, -150)
    queue.push(mine[2])
    assert [queue.pop(0.0) for _ in mine] == mine
    # It is not lost: the next one starts by so much earlier.
    queue.push(item("a"))
    assert queue.ahead("b", 1) == 0


def test_one_who_took_more_than_was_thought_pays_for_it():
    queue = wide()
    for flow in ("greedy", "modest"):
        queue.bypass(item(flow, 10))
    queue.settle("greedy", 1.0, 1, 5000)
    first = [item("greedy"), *(item("modest") for _ in range(20))]
    for each in first:
        queue.push(each)
    assert [queue.pop(0.0) for _ in range(21)].index(first[0]) == 20


def test_when_it_is_full_the_greediest_of_the_lowest_priority_lose_their_newest():
    queue: FairQueue[Item] = FairQueue(4, 10**9)
    batch, few, *many = item("batch", tokens=1, priority=2), item("few"), *(item("many") for _ in range(3))
    for each in (batch, few, *many[:2]):
        assert queue.push(each) == []
    assert queue.push(many[2]) == [batch]
    assert queue.push(item("new")) == [many[2]]
    assert queue.push(item("huge", sequences=5))[0].flow == "huge"
    assert sorted(each.flow for each in iter(lambda: queue.pop(0.0), None)) == ["few", "many", "many", "new"]


def test_expected_waits_follow_the_measured_rate():
    assert wide().expected_wait_s("a", 1, 0.0) is None
    queue = wide(*(item("a", 100) for _ in range(20)))
    for now in range(11):
        queue.pop(float(now))
    # 100 tokens a second; nine are left.
    assert queue.rate(10.0) == pytest.approx(100)
    assert queue.expected_wait_s("a", 1, 10.0) == pytest.approx(9, abs=1)
    assert queue.expected_wait_s("other", 1, 10.0) == pytest.approx(0, abs=1.1)
    assert queue.expected_wait_s("other", 0, 10.0) == 0
    assert queue.expected_wait_s("other", 2, 10.0) == pytest.approx(9)
    # It takes ever longer.
    assert queue.rate(20.0) == pytest.approx(50)
    assert queue.rate(100.0) is None


def test_room_is_what_slots_reports_and_a_spare_one_leave():
    rooms = Rooms(16)
    assert (rooms.left("v", 0), rooms.left("v", 18)) == (18, 0)
    reports: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (4, 6, {"running": 12}),
        # One report may count what has ended meanwhile.
        (2, 8, {"running": 16}),
        (2, 2, {"running": 16}),
        (18, 0, {"waiting": 18, "paused": True}),
        (14, 4, {"waiting": 14, "paused": True}),
        # More wait there than the spare ones: it has no room for more than it runs.
        (9, 0, {"running": 5, "waiting": 4}),
    )
    for own, left, reported in reports:
        rooms.observe(VerifierStats("v", 0.0, "sync", 4, **reported), own=own)
        assert rooms.left("v", own) == left
    assert rooms.left("v", 6) == 1
    rooms.gone("v")
    assert rooms.left("v", 0) == 18
