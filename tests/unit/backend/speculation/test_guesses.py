"""Every draft is compared with the text, whenever it came and whether or not it was verified."""

from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.guesses import KEPT, Guesses

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def truth(text: list[int], base_len: int, tokens: list[int]) -> tuple[int, int]:
    """Matched and seen by the whole text."""
    after = text[base_len:]
    matched = 0
    while matched < min(len(tokens), len(after)) and tokens[matched] == after[matched]:
        matched += 1
    return matched, matched + (matched < len(tokens) and matched < len(after))


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=30),
    st.lists(st.integers(1, 4), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), TOKENS), max_size=12),
)
def test_every_draft_is_scored_once_by_the_text(
    text: list[int], strides: list[int], drafts: list[tuple[int, int, list[int]]]
) -> None:
    """A draft is noted after so many steps, so many tokens late."""
    guesses, length, found, noted = Guesses(), 1, [], {}
    for step, stride in enumerate(strides):
        for number, (at, late, tokens) in enumerate(drafts):
            if at == step:
                base_len = max(length - late, 0)
                noted[number] = base_len, tokens
                found += guesses.note(number, base_len, tokens, [], text[:length])
        new = text[length : length + stride]
        length += len(new)
        found += guesses.advance(text[:length])
    found += guesses.finish(text[:length])
    assert len({known.source for known in found}) == len(found)
    by_source = {known.source: (known.matched, known.seen) for known in found}
    crowded = len(drafts) > KEPT
    for number, (base_len, tokens) in noted.items():
        expected = truth(text[:length], base_len, tokens)
        if number in by_source and not crowded:
            assert by_source[number] == expected
        elif number in by_source:
            assert by_source[number][1] <= expected[1]
        elif not crowded:
            assert expected == (0, 0)


def test_no_more_than_a_few_are_kept_and_none_for_another_text() -> None:
    guesses = Guesses()
    for source in range(KEPT + 1):
        guesses.note(source, 1, [5, 6], [], [1])
    assert [known.source for known in guesses.advance([1, 9])] == list(range(1, KEPT + 1))
    guesses.note("ahead of the text", 4, [5], [], [1, 9])
    assert guesses.advance([1, 9, 5, 5, 5]) == []
    assert guesses.finish([1, 9, 5, 5, 5]) == []
