"""A prediction is followed, left, and found again."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.prediction import NEAREST, PredictedText

PROMPT = [90, 91, 92]
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def drafts(tokens: list[int], answer: list[int], k: int = 3) -> list[list[int]]:
    """What is drafted after each token of the answer."""
    prediction = PredictedText(tokens, len(PROMPT))
    return [prediction.propose(PROMPT + answer[: i + 1], k)[0] for i in range(len(answer))]


def test_an_answer_that_repeats_it_is_drafted_from_the_first_token_on():
    assert drafts(TOKENS, TOKENS[:8]) == [TOKENS[i + 1 : i + 4] for i in range(8)]


def test_what_the_prompt_ends_with_is_no_part_of_the_answer():
    assert drafts([91, 92, 5, 6], [7, 5]) == [[], []], "one token alone is not found"


def test_after_other_tokens_it_is_found_again_by_two_tokens_in_a_row():
    assert drafts(TOKENS, [1, 2, 50, 51, 5, 6, 7]) == [[2, 3, 4], [3, 4, 5], [], [], [], [7, 8, 9], [8, 9, 10]]


def test_of_two_places_the_one_behind_where_it_was_left_is_taken():
    tokens = [1, 2, 10, 11, 12, 20, 1, 2, 30, 31]
    assert drafts(tokens, [1, 2, 10, 11, 70, 1, 2])[-1] == [30, 31]
    assert drafts(tokens, [1, 2, 10, 11, 12, 20, 1, 2, 30, 70, 1, 2])[-1] == [30, 31], "or the nearest before"


def test_of_two_places_the_one_that_agrees_for_longer_is_taken():
    assert drafts([5, 1, 2, 30, 6, 1, 2, 40, 0], [9, 6, 1, 2])[-1] == [40, 0]


class Counted(list[int]):
    """Counts how often its tokens are read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def test_in_a_prediction_that_repeats_itself_only_near_places_are_compared():
    tokens = Counted([7] * 5000)
    prediction = PredictedText(tokens, 0)
    answer = [7] * 2500 + [1, 7, 7]
    prediction.propose(answer[:-1], 3)
    tokens.reads = 0
    assert prediction.propose(answer, 3)[0] == [7, 7, 7]
    assert tokens.reads < 3 * NEAREST


def test_signs_follow_how_well_it_went():
    prediction = PredictedText(TOKENS, 0)
    at_first = prediction.propose(TOKENS[:1], 2)[1]
    prediction.scored(3, 3)
    later = prediction.propose(TOKENS[:4], 2)[1]
    assert len(at_first) == len(later) == 4
    assert later[0] > at_first[0] == 0
    assert later[1] > at_first[1]
    prediction.scored(0, 9)
    assert prediction.propose(TOKENS[:5], 1)[1][0] < 0


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=24), st.data())
def test_what_is_drafted_follows_in_it_what_was_said(tokens: list[int], answer: list[int], data: st.DataObject) -> None:
    prediction, at = PredictedText(tokens, len(PROMPT)), 0
    while at < len(answer):
        at = data.draw(st.integers(at + 1, len(answer)))
        draft, signs = prediction.propose(PROMPT + answer[:at], 4)
        assert len(signs) == 2 * len(draft) <= 8
        if draft:
            emitted = answer[:at]
            begins = [i for i in range(len(tokens)) if tokens[i : i + len(draft)] == draft]
            assert any(tokens[:i] == emitted or tokens[max(i - 2, 0) : i] == emitted[-2:] for i in begins)
