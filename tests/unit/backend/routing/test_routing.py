from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config.settings import Affinity
from backend.fleet import VerifierStats
from backend.routing import choosing
from backend.routing.choosing import BLOCK_TOKENS, Choosing, RoutingRequest, Seen
from tests.support.properties import examples

loads = st.dictionaries(st.text("abc", min_size=1, max_size=2), st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=5)
asks = st.builds(
    RoutingRequest,
    prompt=st.lists(st.integers(0, 1), max_size=3 * BLOCK_TOKENS),
    scope=st.sampled_from(["", "adapter"]),
    session=st.none() | st.sampled_from("xyz"),
)
SWAPPED = {"a": (0, 0), "b": (1, 1)}


def reported(verifier_id: str, running: int) -> VerifierStats:
    return VerifierStats(verifier_id, 0.0, "auto", 8, running=running)


@examples(30)
@given(st.sampled_from(get_args(Affinity)), st.lists(st.tuples(asks, loads), max_size=8))
def test_it_chooses_one_of_those_and_the_same_one_again(affinity, questions):
    alike = [Choosing(affinity) for _ in range(2)]
    for ask, load in questions:
        first, second = (each.choose(ask, load) for each in alike)
        assert first == second
        assert (first in load) if load else first is None
        if affinity == "none" and load:
            assert load[first] == min(load.values())


def test_a_session_returns_until_its_verifier_is_overloaded_or_gone_and_ties_go_to_the_one_used_least(monkeypatch):
    router = Choosing("none")
    for verifier_id in ("a", "b", "b"):
        router.given(verifier_id)
    assert router.choose(RoutingRequest(), {"a": (0, 0), "b": (0, 0)}) == "a"
    monkeypatch.setattr(choosing, "SLACK", 2)
    router = Choosing("session")

    def chosen(session, **load):
        return router.choose(RoutingRequest(session=session), load)

    assert chosen("s", a=(0, 0), b=(0, 0)) == "a"
    assert chosen("s", a=(50, 2), b=(0, 0)) == "a"
    assert chosen("other", a=(50, 2), b=(0, 0)) == "b"
    # Overloaded, by requests of other gateways too: it moves, and then belongs where it went.
    router.observe(reported("a", running=3), own=2)
    assert chosen("s", a=(50, 2), b=(0, 0)) == "b"
    assert chosen("s", a=(0, 0), b=(9, 1)) == "b"
    assert chosen("s", a=(0, 0)) == "a"


def test_a_prompt_goes_where_its_longest_beginning_went():
    router = Choosing("prefix")
    system = list(range(BLOCK_TOKENS))
    assert router.choose(RoutingRequest(prompt=system + [1] * BLOCK_TOKENS), {"a": (1, 1), "b": (0, 0)}) == "b"
    assert router.choose(RoutingRequest(prompt=system + [2] * 9), SWAPPED) == "b"
    # The same tokens under another adapter are another prefix; less than a block is none.
    assert router.choose(RoutingRequest(prompt=system, scope="adapter"), SWAPPED) == "a"
    assert router.choose(RoutingRequest(prompt=system[:-1]), SWAPPED) == "a"


@pytest.mark.parametrize("lost", [lambda router: router.gone("b"), lambda router: router.emptied(["b"])])
def test_a_verifier_that_lost_its_cache_is_no_longer_preferred(lost):
    router, ask = Choosing("both"), RoutingRequest(prompt=list(range(2 * BLOCK_TOKENS)), session="s")
    router.choose(ask, {"b": (0, 0)})
    assert router.choose(ask, SWAPPED) == "b"
    lost(router)
    assert router.choose(ask, SWAPPED) == "a"


@given(st.integers(1, 7), st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=9), st.sampled_from("ab"), st.booleans())))
def test_the_keys_used_last_are_remembered_within_the_bound(entries, uses):
    seen, model = Seen(entries), dict[int, str]()
    for keys, verifier_id, forget in uses:
        if forget:
            seen.forget(verifier_id)
            model = {k: v for k, v in model.items() if v != verifier_id}
        else:
            seen.put(keys, verifier_id)
            for key in reversed(keys):
                model.pop(key, None)
                model = dict([*model.items(), (key, verifier_id)][-entries:])
            assert not keys or seen.longest(keys) == verifier_id
        assert len(seen) <= entries
    for key in range(10):
        assert seen.longest([key]) == model.get(key)
