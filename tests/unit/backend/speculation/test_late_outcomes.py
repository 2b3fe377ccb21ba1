"""Outcomes that come late, empty or never."""

import pytest

from backend.wire.drafting import Block, Draft, Outcome
from tests.unit.backend.speculation.driven import LONGEST_WAIT_S, K, one, speculator


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("may_wait", [True, False])
def test_late_outcomes_are_waited_for_as_long_as_that_pays(comes: bool, may_wait: bool) -> None:
    made, text = one("ahead")
    made.arrived("d0", [Draft("r", 6, [7, 8])], 1e-4, 100.0001)
    made.attach(["r"], 0, 100.0001)
    made.stepped(1, 2, 2e-4, 0.0)
    text += [7, 8, 9]
    made.ended("r", text, 6, 100.0003)
    if not may_wait:
        assert made.ask(100.0003, may_wait)["d0"][0].verifying == []
        return
    assert made.ask(100.0003) == {}
    until = made.hold(["r"], 0, 100.0003)
    assert until is not None
    assert 100.0003 < until <= 100 + LONGEST_WAIT_S
    if comes:
        made.take_blocks("d0", [Block("r", 6, [7, 8], [Outcome(2, 9, [1, 2])])], 1e-4, 100.0004)
    (item,) = made.ask(100.0004 if comes else until)["d0"]
    assert (item.base_len, item.verifying) == (9, [1, 2] if comes else [])


def test_outcomes_may_have_empty_drafts() -> None:
    made, text = one("ahead")
    expected = made.load.foreseen.gains[K]
    made.arrived("d0", [Draft("r", 6, [7])], 1e-4, 100.0001)
    made.attach(["r"], 0, 100.0001)
    made.take_blocks("d0", [Block("r", 6, [7], [Outcome(1, 9, [])])], 1e-4, 100.0002)
    text += [7, 9]
    made.ended("r", text, 6, 100.0003)
    assert [item.verifying for item in made.ask(100.0003)["d0"]] == [[]]
    made.set_drafters({"d0": ""})
    assert made.load.foreseen.gains[K] < expected, "that counts, too"


def test_a_block_that_comes_a_step_too_late_says_nothing_of_hits() -> None:
    made, text = one("ahead")

    def rates() -> list[float]:
        return [made.candidates.foresight.rate(1, verified) for verified in range(K)]

    before = rates()
    for length in (6, 7):
        made.attach(["r"], 0, 100.0 + length)
        text.append(7)
        made.ended("r", text, length, 100.0)
        made.ask(100.0 + length)
        made.take_blocks("d0", [Block("r", 6, [7], [Outcome(1, 7, [1])])], 1e-3, 100.0)
    made.learn()
    assert rates() == before
    assert made.attach(["r"], 0, 110.0).tokens == {}
    text.append(7)
    made.ended("r", text, 8, 100.0)
    made.take_blocks("d0", [Block("r", 8, [], [Outcome(0, 7, [1])])], 1e-3, 100.0)
    made.ask(111.0)
    made.learn()
    assert rates() != before
    assert made.attach(["r"], 0, 111.0).tokens == {"r": [1]}


def test_silence_is_noticed_where_requests_draft_from_their_own_texts_and_only_outcomes_are_asked_for() -> None:
    made, text, now = speculator("ahead", lookups=True), [1, 2, 3] * 20, 100.0
    for step in range(40):
        made.ended("r", text, len(text) - 1, now)
        (item,) = made.ask(now + LONGEST_WAIT_S)["d0"]
        if step > 20:
            assert item.verifying
            made.take_blocks("d0", [Block("r", len(text), item.verifying, [])], 1e-3, now)
            assert made.questions.down() == []
        made.learn()
        now += 2 * LONGEST_WAIT_S
        made.attach(["r"], 0, now)
        text.append(text[-3])
        if step == 20:
            assert made.questions.down() == ["d0"]
