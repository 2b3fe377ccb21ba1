"""Who runs what: longest first, to whoever has the least left to do."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from backend.rollout.dispatch import assign

WINDOW = 3
TOKENS = st.integers(1, 9)


def heap(expected: list[int]) -> list[tuple[int, int]]:
    waiting = [(-tokens, request) for request, tokens in enumerate(expected)]
    heapq.heapify(waiting)
    return waiting


@given(st.lists(TOKENS, max_size=12), st.dictionaries(st.sampled_from("abc"), st.lists(TOKENS, max_size=WINDOW)))
def test_each_request_waits_or_has_one_worker_with_room(expected: list[int], running: dict[str, list[int]]) -> None:
    waiting = heap(expected)
    sent = assign(waiting, running, WINDOW)
    assert sorted([request for request, _ in sent] + [request for _, request in waiting]) == list(range(len(expected)))
    for request, worker in sent:
        free = {name: sum(tokens) for name, tokens in running.items() if len(tokens) < WINDOW}
        assert free[worker] == min(free.values())
        running[worker].append(expected[request])
    assert not waiting or all(len(tokens) == WINDOW for tokens in running.values())
    lengths = [expected[request] for request, _ in sent]
    assert lengths == sorted(expected, reverse=True)[: len(sent)]


def test_longest_first_and_level() -> None:
    assert assign(heap([1, 10, 4, 7, 2, 6]), {"a": [], "b": []}, 10) == [
        (1, "a"),
        (3, "b"),
        (5, "b"),
        (2, "a"),
        (4, "b"),
        (0, "a"),
    ]


@given(st.integers(1, 40), st.integers(1, 4))
def test_equal_requests_go_to_whoever_has_the_fewest(requests: int, workers: int) -> None:
    running: dict[str, list[int]] = {f"w{number}": [] for number in range(workers)}
    for _, worker in assign(heap([100] * requests), running, 100):
        running[worker].append(100)
    counts = [len(each) for each in running.values()]
    assert sum(counts) == requests
    assert max(counts) - min(counts) <= 1
