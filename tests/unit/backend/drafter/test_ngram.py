"""Prompt lookup: the longest suffix seen before decides, and only what the request holds is ever proposed."""

from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.ngram import NgramProposer
from backend.drafter.proposer import DraftRequest, Until
from backend.speculation.lookup import LONGEST, SHORTEST
from backend.speculation.tokens import UNKNOWN


def proposer(capacity: int = 1000) -> NgramProposer:
    return NgramProposer(100, 64, capacity)


def drafts(lookup: NgramProposer, key: str, base_len: int, k: int) -> list[int]:
    drafted = lookup.draft([DraftRequest(key, base_len, 0, None, Until(k))])[0]
    assert drafted.signs == []
    return drafted.tokens


def test_unknown_requests_positions_and_room() -> None:
    lookup = proposer(capacity=8)
    assert not lookup.commit("r", 3, [1], 0)
    assert drafts(lookup, "r", 3, 4) == []
    lookup.open("a", [1, 2, 1, 2], 0)
    lookup.open("b", [1, 2, 1, 2], 0)
    lookup.open("c", [1, 2, 1, 2], 0)
    assert [lookup.length(name) for name in "abc"] == [None, 4, 4]
    assert lookup.usage().evictions == 1
    lookup.open("long", [1, 2] * 31, 0)
    assert drafts(lookup, "long", 62, 9) == [1, 2], "positions end at 64"


commits = st.lists(st.tuples(st.integers(-4, 2), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=40)


@given(commits, st.integers(1, 8))
def test_however_its_text_comes_a_lookup_is_a_search_over_all_tokens(commits: list[tuple[int, list[int]]], k: int) -> None:
    """Commits follow on the text, take back its end, or leave a hole, behind which no draft goes."""
    lookup, text = proposer(), [0]
    lookup.open("r", [0], 0)
    for moved, tokens in commits:
        kept = max(len(text) + moved, 0)
        text = [*text[:kept], *[UNKNOWN] * (kept - len(text)), *tokens]
        if len(text) + k > 64:
            break
        assert lookup.commit("r", len(text), list(tokens), 0)
        assert drafts(lookup, "r", len(text), k) == search(text, k)


def search(tokens: list[int], k: int) -> list[int]:
    for size in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            wanted = tokens[len(tokens) - size :]
            if UNKNOWN not in wanted and tokens[start : start + size] == wanted:
                grown = list(tokens)
                for at in range(start + size, start + size + k):
                    if grown[at] == UNKNOWN:
                        break
                    grown.append(grown[at])
                return grown[len(tokens) :]
    return []
