"""Level-two balancing moves few requests, from slow to fast, never in circles, and only where it pays."""

import random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.fleet.speed import Speed
from backend.routing import balance
from backend.routing.balance import DWELL_S, GAIN, MOVES, BalancingLoad, Movable, Move, expected_remaining, plan_moves

NOW = 100.0


def load(name: str, requests: int, **fields: object) -> BalancingLoad:
    usual = {"speed": Speed(0.02, 0.01, 2.0), "prefill_tokens_per_s": 2000.0, "slots": 16, "free_tokens": 10_000}
    return BalancingLoad(name, requests, **(usual | fields))  # type: ignore[arg-type]


def requests_at(name: str, n: int, tokens: int = 100, remaining: float = 200, placed_at: float = 0.0) -> list[Movable]:
    return [Movable(f"{name}-{i}", name, tokens, remaining, placed_at) for i in range(n)]


def test_nothing_moves_where_loads_are_nearly_level_or_batching_is_free_but_for_a_slot() -> None:
    assert plan_moves([load("a", 5), load("b", 4)], requests_at("a", 5), NOW) == []
    for many, few, count in ((12, 0, 0), (32, 2, MOVES)):
        loads = [load(name, requests, speed=Speed(0.02, 0.0, 2.0)) for name, requests in (("a", many), ("b", few))]
        assert len(plan_moves(loads, requests_at("a", many), NOW)) == count


def test_over_the_widest_gap_the_cheapest_and_longest_lived_goes_first() -> None:
    loads = [load("a", 10), load("b", 6), load("c", 1), load("d", 4)]
    movables = [each for one in loads for each in requests_at(one.id, one.requests)]
    assert {(move.source, move.target) for move in plan_moves(loads, movables, NOW)} == {("a", "c")}
    movables = [
        Movable("heavy", "a", 900, 200, 0.0),
        Movable("light", "a", 100, 200, 0.0),
        Movable("nearly done", "a", 100, 10, 0.0),
    ]
    moves = plan_moves([load("a", 12), load("b", 0)], movables, NOW)
    assert moves[0].request_id == "light"


names = st.sampled_from(["a", "b", "c", "d"])
loads_of = st.builds(
    load,
    names,
    st.integers(0, 40),
    speed=st.builds(Speed, st.floats(0.001, 0.1), st.floats(0, 0.05), st.floats(1, 5)),
    prefill_tokens_per_s=st.floats(100, 1e5),
    slots=st.integers(1, 64),
    free_tokens=st.integers(0, 20_000),
    takes_requests=st.booleans(),
)
fleets = st.lists(loads_of, max_size=4, unique_by=lambda each: each.id)
movable = st.builds(
    Movable, st.uuids().map(str), names, st.integers(1, 4000), st.floats(0, 4000), st.floats(0, NOW, allow_nan=False)
)


def wait(loads: list[BalancingLoad], moves: list[Move]) -> float:
    """The slower of the pair after the moves."""
    by_id = {each.id: each for each in loads}
    slow, fast = by_id[moves[0].source], by_id[moves[0].target]
    return max(
        slow.seconds_per_token(slow.requests - len(moves)) if slow.requests > len(moves) else 0.0,
        fast.seconds_per_token(fast.requests + len(moves)),
    )


@given(fleets, st.lists(movable, max_size=30, unique_by=lambda each: each.id), st.randoms(use_true_random=False))
def test_what_always_holds(loads: list[BalancingLoad], movables: list[Movable], rng: random.Random) -> None:
    moves = plan_moves(loads, movables, NOW)
    by_id = {each.id: each for each in movables}
    fleet = {each.id: each for each in loads}
    assert len(moves) <= MOVES
    assert len({move.request_id for move in moves}) == len(moves)
    assert len({(move.source, move.target) for move in moves}) <= 1
    for move in moves:
        request = by_id[move.request_id]
        assert request.verifier_id == move.source != move.target
        assert NOW - request.placed_at >= DWELL_S
        assert move.gain_s > GAIN * move.cost_s >= 0
        assert fleet[move.target].takes_requests
    if moves:
        brought = sum(by_id[move.request_id].tokens for move in moves)
        assert brought <= fleet[moves[0].target].free_tokens
        slow = fleet[moves[0].source]
        assert wait(loads, moves) <= slow.seconds_per_token(slow.requests)
    rng.shuffle(loads)
    rng.shuffle(movables)
    assert plan_moves(loads, movables, NOW) == moves


@patch.object(balance, "DWELL_S", 0.0)
@given(st.integers(0, 40), st.integers(0, 40))
def test_it_comes_to_rest(at_a: int, at_b: int) -> None:
    """Even without dwell, moves never go in circles."""
    where = {f"r{i}": "a" if i < at_a else "b" for i in range(at_a + at_b)}
    moved: set[str] = set()
    for _ in range(40):
        counts = {name: list(where.values()).count(name) for name in ("a", "b")}
        movables = [Movable(request, name, 50, 500, NOW) for request, name in where.items()]
        moves = plan_moves([load("a", counts["a"]), load("b", counts["b"])], movables, NOW)
        if not moves:
            break
        for move in moves:
            assert move.request_id not in moved
            moved.add(move.request_id)
            where[move.request_id] = move.target
    assert not moves
    assert abs(list(where.values()).count("a") - list(where.values()).count("b")) <= max(2, 0.35 * len(where))


@pytest.mark.parametrize(
    ("emitted", "limit", "expected"), [(0, 1000, 64), (300, 1000, 300), (900, 1000, 100), (10, 20, 10), (30, 20, 0)]
)
def test_expected_remaining(emitted: int, limit: int, expected: float) -> None:
    assert expected_remaining(emitted, limit, 64) == expected
