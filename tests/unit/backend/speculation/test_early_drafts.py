"""Fresh drafts are asked for before a step's outcome is known, where nothing but its tokens depends on that."""

from __future__ import annotations

import pytest

from backend.speculation.chances import Rule
from backend.speculation.speculator import NOTHING
from backend.speculation.waiting import Ask, Choice
from backend.wire.drafting import Draft
from tests.support.driven_speculator import LONGEST_WAIT_S, K, one, speculator


def test_the_drafts_behind_a_step_are_asked_for_with_it() -> None:
    made, text = one()
    assert made.attach(["r"], 0, 100.2).asks == {"r": (K, 0.0)}
    text.append(7)
    made.ended("r", text, 6, Rule.GREEDY, 100.21)
    assert made.hold(["r"], 0, 100.21) == pytest.approx(100.21 + LONGEST_WAIT_S), "asked for, though nothing was sent since"
    ((verdict, waited_s),) = made.arrived("d0", [Draft("r", 7, [8, 9], [8.0] * 4)], 1e-3, 100.22)
    assert verdict == "ready"
    assert waited_s == pytest.approx(0.01)
    assert made.ask(100.22) == {}
    assert made.hold(["r"], 0, 100.22) is None
    assert made.attach(["r"], 0, 100.22).tokens == {"r": [8, 9]}


def test_nothing_is_asked_early_where_the_outcome_decides() -> None:
    made, _ = one("ahead")
    assert made.attach(["r"], 0, 100.2).asks == {}, "it may be drafted for already"
    repeating, text = one(lookups=True)
    text += [1, 2, 3, 4, 5, 6]
    repeating.learn(0.0)
    attached = repeating.attach(["r"], 0, 100.3)
    assert attached.tokens
    assert attached.asks == {}, "its own text may go on so"


def test_nobody_waits_for_a_draft_that_a_look_up_has_replaced() -> None:
    made, text = one(lookups=True)
    assert made.attach(["r"], 0, 100.2).asks
    text += [1, 2, 3, 4, 5, 6]
    made.ended("r", text, 6, Rule.GREEDY, 100.21)
    made.learn(0.0)
    assert made.ask(100.21) == {}
    assert made.hold(["r"], 0, 100.21) is None
    assert made.arrived("d0", [Draft("r", 12, [9, 9])], 1e-3, 100.22)[0][0] == "ready"


def test_drafts_asked_for_before_drafters_were_given_up_are_not_waited_for() -> None:
    made, text = speculator("auto"), [1, 2, 3, 4, 5, 6]
    made.ended("r", text, 5, Rule.GREEDY, 100.0)
    made._asking.choice = Choice(Ask.DRAFT, K, 0.0)
    while not made.attach(["r"], 0, 100.2).asks:
        """A probe."""
    made._asking.choice = NOTHING
    text.append(7)
    made.ended("r", text, 6, Rule.GREEDY, 100.21)
    assert made.ask(100.21) == {}
    assert made.hold(["r"], 0, 100.21) is None
