from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from backend.config.settings import Affinity, GatewaySettings
from backend.routing.affinity import BLOCK_TOKENS, PrefixMap, RecentMap
from backend.routing.routers import LeastLoaded, RoutingCandidate, RoutingRequest, WithAffinity, make_router
from tests.support.properties import examples

AFFINITIES = get_args(Affinity)


candidates = st.lists(
    st.builds(
        RoutingCandidate,
        id=st.text("abc", min_size=1, max_size=2),
        tokens=st.integers(0, 5),
        requests=st.integers(0, 12),
        routed=st.integers(0, 3),
        others=st.integers(0, 12),
    ),
    max_size=5,
    unique_by=lambda each: each.id,
)
asks = st.builds(
    RoutingRequest,
    prompt=st.lists(st.integers(0, 1), max_size=3 * BLOCK_TOKENS),
    scope=st.sampled_from(["", "adapter"]),
    session=st.none() | st.sampled_from("xyz"),
)


@examples(30)
@given(st.sampled_from(AFFINITIES), st.lists(st.tuples(asks, candidates), max_size=8))
def test_every_router_chooses_a_candidate_and_the_same_one_again(affinity, questions):
    routers = [make_router(GatewaySettings(affinity=affinity)) for _ in range(2)]
    for ask, those in questions:
        first, second = (router.choose(ask, those) for router in routers)
        assert first == second
        assert (first in {each.id for each in those}) if those else first is None


@given(candidates)
def test_least_loaded_chooses_one_of_the_least_loaded(those):
    chosen = LeastLoaded().choose(RoutingRequest(), those)
    if those:
        tokens = {each.id: each.tokens for each in those}
        assert tokens[chosen] == min(tokens.values())


def test_ties_go_to_the_one_used_least():
    idle = [RoutingCandidate("a", 0, 0, 7), RoutingCandidate("b", 0, 0, 3)]
    assert LeastLoaded().choose(RoutingRequest(), idle) == "b"


def test_a_session_returns_until_its_verifier_is_overloaded_or_gone():
    router = WithAffinity(LeastLoaded(), "session", slack=2, entries=10)

    def chosen(session, *those):
        return router.choose(RoutingRequest(session=session), [RoutingCandidate(*each) for each in those])

    assert chosen("s", ("a", 0, 0, 0), ("b", 0, 0, 1)) == "a"
    assert chosen("s", ("a", 50, 2, 5), ("b", 0, 0, 0)) == "a"
    assert chosen("other", ("a", 50, 2, 5), ("b", 0, 0, 0)) == "b"
    # Overloaded: it moves, and then belongs where it went.
    assert chosen("s", ("a", 50, 3, 5), ("b", 0, 0, 0)) == "b"
    assert chosen("s", ("a", 0, 0, 5), ("b", 9, 1, 9)) == "b"
    assert chosen("s", ("a", 0, 0, 5)) == "a"


def test_a_prompt_goes_where_its_longest_beginning_went():
    router = WithAffinity(LeastLoaded(), "prefix", slack=9, entries=100)
    those = [RoutingCandidate("a", 1, 1, 0), RoutingCandidate("b", 0, 0, 0)]
    swapped = [RoutingCandidate("a", 0, 0, 0), RoutingCandidate("b", 1, 1, 0)]
    system = list(range(BLOCK_TOKENS))
    assert router.choose(RoutingRequest(prompt=system + [1] * BLOCK_TOKENS), those) == "b"
    assert router.choose(RoutingRequest(prompt=system + [2] * 9), swapped) == "b"
    # The same tokens under another adapter are another prefix; less than a block is none.
    assert router.choose(RoutingRequest(prompt=system, scope="adapter"), swapped) == "a"
    assert router.choose(RoutingRequest(prompt=system[:-1]), swapped) == "a"


def test_a_verifier_that_lost_its_cache_is_no_longer_preferred():
    router = WithAffinity(LeastLoaded(), "both", slack=9, entries=100)
    prompt = list(range(2 * BLOCK_TOKENS))
    swapped = [RoutingCandidate("a", 0, 0, 0), RoutingCandidate("b", 1, 1, 0)]
    router.choose(RoutingRequest(prompt=prompt, session="s"), [RoutingCandidate("b", 0, 0, 0)])
    assert router.choose(RoutingRequest(prompt=prompt, session="s"), swapped) == "b"
    router.forget(["b"])
    assert router.choose(RoutingRequest(prompt=prompt, session="s"), swapped) == "a"


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
