"""What a request's own text, and what other requests generated, go on with."""

import random

from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.candidates import INDEXED_PER_STEP
from backend.speculation.lookup import Lookup
from backend.speculation.shared import WAITING, SharedText, SharedTexts
from backend.speculation.texts import OwnText

ALL = 10_000


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 5), max_size=12))
def test_look_ups_find_the_latest_occurrence_of_the_longest_suffix(text: list[int], strides: list[int]) -> None:
    """As `Lookup` does, which `drafter/test_ngram.py` compares with a search over all tokens."""
    own, length = OwnText(), len(text) // 2
    own.advance(text[:length], ALL)
    for stride in strides:
        length = min(length + stride, len(text))
        own.advance(text[:length], ALL)
        tokens, signs = own.propose(text[:length], 4)
        assert tokens == Lookup(text[:length], 2, 4).draft(4)
        assert len(signs) == 2 * len(tokens)
        assert set(signs[1::2]) <= {-1.0, 0.0, 1.0}


def test_a_look_up_follows_tokens_that_are_not_findable_yet() -> None:
    own = OwnText()
    assert own.propose([1, 2, 1, 2], 2) == ([], [])
    own.advance([1, 2, 3, 4, 5], ALL)
    assert own.propose([1, 2, 3, 4, 5, 9, 2, 3], 2) == ([4, 5], [0.0, -1.0] * 2)


def test_a_request_that_copies_says_so_in_its_signs() -> None:
    own = OwnText()
    own.advance([1, 2, 3, 1, 2], ALL)
    for _ in range(8):
        own.scored(4, 4)
    assert own.propose([1, 2, 3, 1, 2], 1)[1][0] > 2
    for _ in range(30):
        own.scored(0, 1)
    assert own.propose([1, 2, 3, 1, 2], 1)[1][0] < -1


def test_a_long_prompt_is_made_findable_over_several_steps() -> None:
    own = OwnText()
    text = [*range(3 * INDEXED_PER_STEP), *range(2 * INDEXED_PER_STEP, 2 * INDEXED_PER_STEP + 3)]
    assert own.advance(text, INDEXED_PER_STEP) == INDEXED_PER_STEP
    assert own.propose(text, 2)[0] == []
    for _ in range(3):
        own.advance(text, INDEXED_PER_STEP)
    assert own.propose(text, 2)[0] == [2 * INDEXED_PER_STEP + 3, 2 * INDEXED_PER_STEP + 4]


def generated(texts: SharedTexts, prompt: list[int], output: list[int], tenant: str = "") -> SharedText:
    """A request that has generated this."""
    reader = texts.reader(tenant, len(prompt))
    reader.advance([*prompt, *output], ALL)
    return reader


OUTPUT = [11, 12, 13, 14, 15, 16, 17, 18]


def test_a_request_is_read_along_with_what_another_one_of_its_tenant_generated() -> None:
    texts = SharedTexts()
    generated(texts, [1, 2, 3, 4, 5], OUTPUT, tenant="a")
    reader, text = texts.reader("a", 5), [1, 2, 3, 4, 5]
    assert texts.reader("b", 5).propose(text, 3)[0] == []
    assert reader.propose(text, 3)[0] == OUTPUT[:3], "the ending of the prompt counts, too"
    assert reader.propose([*text, 11, 12], 3)[0] == OUTPUT[2:5]
    assert reader.propose([*text, 11, 12, 99], 3)[0] == []
    assert reader.propose([*text, 11, 12, 99, *OUTPUT[2:6]], 3)[0] == OUTPUT[6:], "found again by four tokens"
    signs = reader.propose([*text, 11, 12, 99, *OUTPUT[2:7]], 3)[1]
    assert signs == [0.0, 5 - 3.0], "five tokens have agreed"


def test_the_longer_ending_is_preferred_and_of_equal_ones_the_latest() -> None:
    texts, ending = SharedTexts(), [1, 2, 3, 4, 5, 6, 7, 8]
    generated(texts, ending, [50, 51])
    generated(texts, [0, *ending[4:]], [60, 61])
    assert texts.reader("", 8).propose(ending, 1)[0] == [50]
    assert texts.reader("", 8).propose([9, *ending[4:]], 1)[0] == [60]
    generated(texts, ending, [70, 71])
    assert texts.reader("", 8).propose(ending, 1)[0] == [70]


def test_requests_that_run_at_the_same_time_draft_for_each_other_and_not_for_themselves() -> None:
    texts, prompt = SharedTexts(), [1, 2, 3, 4, 5]
    first, second = texts.reader("", 5), texts.reader("", 5)
    first.advance([*prompt, 11, 12, 13], ALL)
    assert second.propose([*prompt, 11], 4)[0] == [12, 13]
    assert second.propose([*prompt, 11, 12, 13], 4)[0] == [], "there is no more of it"
    first.advance([*prompt, 11, 12, 13, 14], ALL)
    assert second.propose([*prompt, 11, 12, 13], 4)[0] == [14], "now there is"
    alone = SharedTexts()
    own = generated(alone, prompt, [7, 8, 9, 6, 7, 8, 9, 6, 7, 8, 9])
    assert own.propose([*prompt, 7, 8, 9, 6, 7, 8, 9, 6, 7, 8, 9], 2)[0] == [], "that is what `OwnText` is for"


def test_other_verifiers_outputs_are_indexed_in_spare_time() -> None:
    texts, prompt = SharedTexts(), [1, 2, 3, 4, 5]
    texts.take("a", [*prompt, *OUTPUT], len(prompt))
    texts.take("a", [*prompt, 77, 78, 79, 80, 81], len(prompt))
    texts.advance(3)
    assert texts.reader("a", 5).propose(prompt, 8)[0] == OUTPUT[:3]
    texts.advance(ALL)
    assert texts.reader("a", 5).propose([*prompt, 11, 12, 13], 8)[0] == OUTPUT[3:]
    assert texts.reader("a", 5).propose(prompt, 2)[0] == [77, 78]
    assert texts.reader("b", 5).propose(prompt, 8)[0] == []
    for _ in range(8):
        texts.take("a", [1] * (WAITING // 4), 0)
    assert [len(text) for _, text in texts._waiting] == [WAITING // 4] * 4


def test_other_verifiers_outputs_push_out_none_of_the_own() -> None:
    texts, dice, prompt = SharedTexts(), random.Random(5), [1, 2, 3, 4, 5]
    generated(texts, prompt, OUTPUT)
    for _ in range(100):
        texts.take("", [dice.randrange(50_000) for _ in range(2000)], 0)
        texts.advance(ALL)
    assert texts.reader("", 5).propose(prompt, 3)[0] == OUTPUT[:3]


def test_names_of_tenants_are_not_kept() -> None:
    texts = SharedTexts()
    for name in range(1000):
        texts.reader(f"salt {name}", 0)
    texts.reader("\ud800", 0)
    assert len(texts._own) + len(texts._others) + len(texts._waiting) == 0


def test_memory_is_bounded_and_the_latest_texts_stay() -> None:
    texts, dice = SharedTexts(), random.Random(5)
    outputs = [[dice.randrange(50_000) for _ in range(2000)] for _ in range(60)]
    for output in outputs:
        generated(texts, [1, 2, 3, 4], output)
    assert texts.reader("", 0).propose(outputs[-1][:20], 4)[0] == outputs[-1][20:24]
    assert texts.reader("", 0).propose(outputs[0][:20], 4)[0] == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4), st.data())
def test_what_is_drafted_follows_the_request_s_ending_in_another_output(outputs: list[list[int]], data: st.DataObject) -> None:
    texts, prompt = SharedTexts(), [0, 1, 2, 0]
    for output in outputs:
        generated(texts, prompt, output)
    reader, text = texts.reader("", len(prompt)), list(prompt)
    for _ in range(data.draw(st.integers(1, 6))):
        draft, signs = reader.propose(text, 4)
        assert len(signs) == 2 * len(draft)
        whole = [[*prompt, *output] for output in outputs]
        assert not draft or any(
            each[i : i + 4 + len(draft)] == [*text[-4:], *draft] for each in whole for i in range(len(each) - 4)
        )
        text += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        reader.advance(text, ALL)
