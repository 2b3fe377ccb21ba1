"""Prompt lookup: the longest suffix seen before decides, and only what the request holds is ever proposed."""

from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.ngram import NgramProposer
from backend.drafter.proposer import DraftRequest, Until
from backend.speculation.lookup import Lookup
from backend.speculation.tokens import UNKNOWN


def proposer(capacity: int = 1000) -> NgramProposer:
    return NgramProposer(100, 64, capacity)


def drafts(lookup: NgramProposer, key: str, base_len: int, k: int) -> list[int]:
    drafted = lookup.draft([DraftRequest(key, base_len, 0, None, Until(k))])[0]
    assert drafted.signs == []
    return drafted.tokens


def opened(tokens: list[int], k: int) -> list[int]:
    lookup = proposer()
    lookup.open("r", list(tokens), 0)
    return drafts(lookup, "r", len(tokens), k)


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    assert opened([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 1) == [50]
    assert Lookup([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 2, 2).draft(1) == [60]


def test_commits_extend_and_take_back() -> None:
    lookup = proposer()
    lookup.open("r", [1, 2, 3, 4], 0)
    assert lookup.commit("r", 6, [1, 2], 0)
    assert drafts(lookup, "r", 6, 2) == [3, 4]
    assert lookup.commit("r", 4, [8, 9], 0)
    assert drafts(lookup, "r", 4, 2) == []
    assert lookup.commit("r", 6, [1, 2], 0)
    assert drafts(lookup, "r", 6, 2) == [8, 9]


def test_a_hole_is_never_drafted() -> None:
    lookup = proposer()
    lookup.open("r", [1, 2], 0)
    assert lookup.commit("r", 5, [1, 2], 0)
    assert UNKNOWN not in drafts(lookup, "r", 5, 4)


def test_unknown_requests_positions_and_room() -> None:
    lookup = proposer(capacity=8)
    assert not lookup.commit("r", 3, [1], 0)
    assert drafts(lookup, "r", 3, 4) == []
    lookup.open("a", [1, 2, 1, 2], 0)
    lookup.open("b", [1, 2, 1, 2], 0)
    lookup.open("c", [1, 2, 1, 2], 0)
    assert [lookup.length(name) for name in "abc"] == [None, 4, 4]
    assert lookup.usage().evictions == 1
    assert opened([1, 2] * 31, 9) == [1, 2], "positions end at 64"


@given(st.lists(st.integers(0, 1), min_size=1, max_size=50), st.integers(0, 8), st.integers(1, 3), st.integers(0, 3))
def test_incremental_lookup_is_a_search_over_all_tokens(tokens: list[int], k: int, shortest: int, more: int) -> None:
    longest = shortest + more
    lookup = Lookup(tokens[:1], shortest, longest)
    for n in range(2, len(tokens) + 1):
        lookup.update(n, [tokens[n - 1]])
        lookup.draft(1)
    assert lookup.draft(k) == search(tokens, k, shortest, longest)


def search(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                grown = list(tokens)
                for at in range(start + size, start + size + k):
                    grown.append(grown[at])
                return grown[len(tokens) :]
    return []
