import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config.settings import Affinity, Routing
from backend.fleet.speed import Speed
from backend.routing.affinity import BLOCK_TOKENS, PrefixMap, RecentMap
from backend.routing.routers import (
    Ask,
    Candidate,
    LeastLoaded,
    Measured,
    PowerOfTwo,
    PredictedTgs,
    WithAffinity,
    make_router,
    predicted_tgs,
)

POLICIES = get_args(Routing)
AFFINITIES = get_args(Affinity)


def measured(**changes):
    values: dict[str, Any] = {
        "running": 0,
        "waiting": 0,
        "kv_free": 4096.0,
        "kv_held": 0.0,
        "speed": Speed(0.02, 0.002, 3.0),
        "response_tokens": 100.0,
    }
    return Measured(**(values | changes))


measurements = st.builds(
    Measured,
    running=st.integers(0, 5),
    waiting=st.integers(0, 5),
    kv_free=st.sampled_from([0.0, 50.0, 1e4, float("inf")]),
    kv_held=st.floats(0, 1e4),
    speed=st.builds(Speed, st.floats(1e-4, 1), st.floats(0, 0.1), st.floats(1, 9)),
    response_tokens=st.floats(1, 1000),
)
candidates = st.lists(
    st.builds(
        Candidate,
        id=st.text("abc", min_size=1, max_size=2),
        tokens=st.integers(0, 5),
        requests=st.integers(0, 12),
        routed=st.integers(0, 3),
        measured=st.none() | measurements,
        others=st.integers(0, 12),
    ),
    max_size=5,
    unique_by=lambda each: each.id,
)
asks = st.builds(
    Ask,
    tokens=st.integers(0, 100),
    prompt=st.lists(st.integers(0, 1), max_size=3 * BLOCK_TOKENS),
    scope=st.sampled_from(["", "adapter"]),
    session=st.none() | st.sampled_from("xyz"),
)


@given(
    st.sampled_from(POLICIES), st.sampled_from(AFFINITIES), st.integers(0, 9), st.lists(st.tuples(asks, candidates), max_size=8)
)
def test_every_router_chooses_a_candidate_and_the_same_one_again(policy, affinity, seed, questions):
    routers = [make_router(policy, affinity, seed=seed, slots=4) for _ in range(2)]
    for ask, those in questions:
        first, second = (router.choose(ask, those) for router in routers)
        assert first == second
        assert (first in {each.id for each in those}) if those else first is None


@given(candidates)
def test_least_loaded_chooses_one_of_the_least_loaded(those):
    chosen = LeastLoaded().choose(Ask(10), those)
    if those:
        tokens = {each.id: each.tokens for each in those}
        assert tokens[chosen] == min(tokens.values())


def test_ties_go_to_the_one_used_least():
    idle = [Candidate("a", 0, 0, 7), Candidate("b", 0, 0, 3)]
    assert LeastLoaded().choose(Ask(1), idle) == "b"


@given(candidates, st.integers(0, 99))
def test_power_of_two_never_takes_the_most_loaded_of_three_or_more(those, seed):
    chosen = PowerOfTwo(seed).choose(Ask(1), those)
    loads = sorted(each.load for each in those)
    if len(those) >= 2 and loads[-1] > loads[-2]:
        assert next(each.load for each in those if each.id == chosen) < loads[-1]


def test_power_of_two_keeps_loads_far_more_even_than_one_random_choice():
    def spread(choose):
        loads = dict.fromkeys(range(50), 0)
        for _ in range(2000):
            loads[choose(loads)] += 1
        return max(loads.values()) - min(loads.values())

    router, dice = PowerOfTwo(7), random.Random(7)
    two = spread(lambda loads: int(router.choose(Ask(1), [Candidate(str(i), n, n, 0) for i, n in loads.items()]) or ""))
    one = spread(lambda loads: dice.randrange(len(loads)))
    assert two <= 6 < one


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (measured(speed=Speed(0.02, 0.002, 4.0)), measured()),
        (measured(), measured(speed=Speed(0.05, 0.002, 3.0))),
        (measured(running=2), measured(running=6)),
        (measured(running=4), measured(running=4, waiting=3)),
        (measured(running=4, kv_held=400.0), measured(running=4, kv_held=400.0, kv_free=50.0)),
    ],
    ids=["acceptance", "step time", "batch", "queue", "KV cache"],
)
def test_predicted_tgs_weighs_what_was_measured(better, worse):
    # By name and by own load the worse one would come first.
    there = [each.running + each.waiting for each in (worse, better)]
    those = [Candidate("a", 0, 0, 0, worse, there[0]), Candidate("b", 9, 1, 9, better, there[1] - 1)]
    assert PredictedTgs(slots=8).choose(Ask(20), those) == "b"


def test_predicted_tgs_is_the_reciprocal_of_the_predicted_time():
    # 3 tokens per step of 20 ms + 2 ms * (4 + 1) sequences.
    assert predicted_tgs(20, Candidate("a", 0, 4, 0), measured(), slots=8) == pytest.approx(3 / 0.030)
    # Four run, three wait, one comes: four must finish first, and one in four finishes per quarter of a response.
    full = measured(running=4, waiting=3)
    response_s = 100 / (3 / 0.028)
    assert predicted_tgs(20, Candidate("a", 0, 7, 0), full, slots=4) == pytest.approx(100 / (response_s + response_s))


@given(st.integers(0, 64), st.integers(1, 64), measurements)
def test_predicted_tgs_falls_with_load(load, slots, known):
    def at(requests):
        return predicted_tgs(10, Candidate("a", 0, requests, 0), known, slots)

    assert at(load + 1) <= at(load) * (1 + 1e-9)
    assert at(load) > 0


def test_a_verifier_not_yet_measured_is_taken_for_average():
    those = [Candidate("a", 0, 5, 0, measured(running=5)), Candidate("b", 0, 0, 0, None)]
    assert PredictedTgs(slots=8).choose(Ask(20), those) == "b"
    busy = [Candidate("a", 0, 0, 0, measured()), Candidate("b", 0, 5, 0, None)]
    assert PredictedTgs(slots=8).choose(Ask(20), busy) == "a"


def test_a_session_returns_until_its_verifier_is_overloaded_or_gone():
    router = WithAffinity(LeastLoaded(), "session", slack=2, entries=10)
    idle = [Candidate("a", 0, 0, 0), Candidate("b", 0, 0, 1)]
    assert router.choose(Ask(1, session="s"), idle) == "a"
    assert router.choose(Ask(1, session="s"), [Candidate("a", 50, 2, 5), Candidate("b", 0, 0, 0)]) == "a"
    assert router.choose(Ask(1, session="other"), [Candidate("a", 50, 2, 5), Candidate("b", 0, 0, 0)]) == "b"
    # Overloaded: it moves, and then belongs where it went.
    assert router.choose(Ask(1, session="s"), [Candidate("a", 50, 3, 5), Candidate("b", 0, 0, 0)]) == "b"
    assert router.choose(Ask(1, session="s"), [Candidate("a", 0, 0, 5), Candidate("b", 9, 1, 9)]) == "b"
    assert router.choose(Ask(1, session="s"), [Candidate("a", 0, 0, 5)]) == "a"


def test_a_prompt_goes_where_its_longest_beginning_went():
    router = WithAffinity(LeastLoaded(), "prefix", slack=9, entries=100)
    those = [Candidate("a", 1, 1, 0), Candidate("b", 0, 0, 0)]
    swapped = [Candidate("a", 0, 0, 0), Candidate("b", 1, 1, 0)]
    system = list(range(BLOCK_TOKENS))
    assert router.choose(Ask(64, prompt=system + [1] * BLOCK_TOKENS), those) == "b"
    assert router.choose(Ask(64, prompt=system + [2] * 9), swapped) == "b"
    # The same tokens under another adapter are another prefix; less than a block is none.
    assert router.choose(Ask(64, prompt=system, scope="adapter"), swapped) == "a"
    assert router.choose(Ask(64, prompt=system[:-1]), swapped) == "a"


def test_a_verifier_that_lost_its_cache_is_no_longer_preferred():
    router = WithAffinity(LeastLoaded(), "both", slack=9, entries=100)
    prompt = list(range(2 * BLOCK_TOKENS))
    swapped = [Candidate("a", 0, 0, 0), Candidate("b", 1, 1, 0)]
    router.choose(Ask(64, prompt=prompt, session="s"), [Candidate("b", 0, 0, 0)])
    assert router.choose(Ask(64, prompt=prompt, session="s"), swapped) == "b"
    router.forget(["b"])
    assert router.choose(Ask(64, prompt=prompt, session="s"), swapped) == "a"


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.booleans()), max_size=60))
def test_recent_map_remembers_the_latest_keys_within_its_bound(entries, uses):
    memory: RecentMap[int] = RecentMap(entries)
    model: dict[int, str] = {}
    for key, verifier_id, forget in uses:
        if forget:
            memory.forget(verifier_id)
            model = {k: v for k, v in model.items() if v != verifier_id}
        else:
            memory.put(key, verifier_id)
            model.pop(key, None)
            model[key] = verifier_id
            model = dict(list(model.items())[-entries:])
        assert len(memory) <= entries
    for key in range(10):
        assert memory.get(key) == model.get(key)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=200), st.sampled_from("ab")), max_size=20))
def test_prefix_map_is_bounded(prompts):
    memory = PrefixMap(7)
    for prompt, verifier_id in prompts:
        memory.put_prompt("", prompt, verifier_id)
        assert len(memory) <= 7
        if len(prompt) >= BLOCK_TOKENS:
            assert memory.longest("", prompt[:BLOCK_TOKENS]) == verifier_id


def test_every_policy_is_a_router_of_its_own_and_no_other_name_is_one():
    routers = [make_router(policy, seed=0, slots=4) for policy in POLICIES]
    assert len({type(router) for router in routers}) == len(POLICIES)
    unknown: Any = "least-loadad"
    with pytest.raises(AssertionError, match=unknown):
        make_router(unknown, seed=0, slots=4)
