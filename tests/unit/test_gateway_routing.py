from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import Candidate, LeastLoaded

candidates = st.lists(
    st.builds(
        Candidate,
        id=st.text("abc", min_size=1, max_size=3),
        tokens=st.integers(0, 5),
        requests=st.integers(0, 3),
        routed=st.integers(0, 3),
    ),
    unique_by=lambda each: each.id,
)


@given(candidates)
def test_chooses_one_of_the_least_loaded(given_candidates):
    chosen = LeastLoaded().choose(10, given_candidates)
    if not given_candidates:
        assert chosen is None
        return
    tokens = {each.id: each.tokens for each in given_candidates}
    assert tokens[chosen] == min(tokens.values())


def test_ties_go_to_the_one_used_least():
    idle = [Candidate("a", 0, 0, 7), Candidate("b", 0, 0, 3)]
    assert LeastLoaded().choose(1, idle) == "b"
