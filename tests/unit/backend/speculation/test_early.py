"""Steps that may begin, and drafts that are asked for, before the text of the step before is known."""

import itertools

import pytest

from backend.speculation.candidates import RESTS_AFTER
from backend.speculation.chances import Rule
from backend.speculation.speculator import NOTHING
from backend.speculation.waiting import PROBE_EVERY, PROBE_STEPS, Ask, Choice
from backend.wire.drafting import Draft
from backend.wire.engine import RequestOptions
from tests.unit.backend.speculation.driven import LONGEST_WAIT_S, Drafter, Driven, K, one, sampled, speculator


def test_steps_begin_early_while_nobody_is_asked_and_no_look_up_pays() -> None:
    driven = Driven(speculator("auto", lookups=True), Drafter(0.02), requests=24, token_s=2e-4, early=True)
    turns = driven.run(4 * PROBE_EVERY)[2 * PROBE_EVERY :]
    assert driven.speculator.choice.ask == Ask.PLAIN
    for turn in turns:
        assert not turn.is_early or (turn.attached.is_quiet and not turn.attached.features_needed and not turn.asks)
    runs = [sum(1 for _ in run) for is_early, run in itertools.groupby(turn.is_early for turn in turns) if is_early]
    assert max(runs) == RESTS_AFTER - 1
    assert sum(runs) > 0.8 * len(turns)
    assert sum(turn.attached.features_needed for turn in turns) == 2 * PROBE_STEPS


def test_after_early_steps_every_request_is_looked_up() -> None:
    driven = Driven(speculator("auto", lookups=True), Drafter(0.02), requests=24, early=True)
    while not (driven.step().is_early and (driven.speculator.candidates.steps + 1) % RESTS_AFTER == 0):
        pass
    at = {name: len(text) for name, text in driven.texts.items()}
    assert not driven.step().is_early
    assert {name: request.looked_up_at for name, request in driven.speculator.candidates.requests.items()} == at


def about_to_be_early() -> Driven:
    """After an early step, before another one."""
    driven = Driven(speculator("auto", lookups=True), Drafter(0.02), requests=24, early=True)
    while not driven.step().is_early or not driven.speculator.may_be_early():
        pass
    return driven


@pytest.mark.parametrize("options", [RequestOptions(mode="sync"), RequestOptions(mode="ahead"), RequestOptions(prediction=[1])])
def test_no_step_begins_early_for_a_request_that_wants_drafts(options: RequestOptions) -> None:
    driven = about_to_be_early()
    driven.speculator.begin("new", options, prompt_len=3)
    driven.speculator.ended("new", [1, 2, 3], 2, 100.0)
    assert not driven.speculator.may_be_early()


def test_drafts_that_come_late_are_looked_at_before_another_step_begins_early() -> None:
    driven = about_to_be_early()
    driven.speculator.arrived("d0", [Draft("r0", len(driven.texts["r0"]), [1])], 1e-3, driven.now)
    assert not driven.speculator.may_be_early()


def test_the_drafts_behind_a_step_are_asked_for_with_it() -> None:
    made, text = one()
    assert made.attach(["r"], 0, 100.2).asks == {"r": (K, 0.0)}
    text.append(7)
    made.ended("r", text, 6, 100.21)
    assert made.hold(["r"], 0, 100.21) == pytest.approx(100.21 + LONGEST_WAIT_S), "asked for, though nothing was sent since"
    ((verdict, waited_s),) = made.arrived("d0", [Draft("r", 7, [8, 9], [8.0] * 4)], 1e-3, 100.22)
    assert verdict == "ready"
    assert waited_s == pytest.approx(0.01)
    assert made.ask(100.22) == {}
    assert made.hold(["r"], 0, 100.22) is None
    assert made.attach(["r"], 0, 100.22).tokens == {"r": [8, 9]}


def test_a_draft_for_a_length_that_has_passed_is_not_verified() -> None:
    """It came while a step ran that had begun before the text was known."""
    made, text = one()
    made.attach(["r"], 0, 100.2)
    assert made.arrived("d0", [Draft("r", 6, [8, 9], [8.0] * 4)], 1e-3, 100.21)[0][0] == "ready"
    text.append(7)
    assert made.attach(["r"], 0, 100.22).tokens == {}


def test_nothing_is_decided_by_what_a_sampled_draft_says_of_its_later_tokens() -> None:
    """Before it is verified; then what was read of it counts."""
    promised = set()
    for later in (-8.0, 8.0):
        made, _ = one(rule=Rule.INDEPENDENT)
        before = made.candidates.drafted.prospect(1, [1.0] * 20)
        assert made.arrived("d0", [sampled(6, [8, 9], [0.0, 0.0, later, later])], 1e-3, 100.21)[0][0] == "ready"
        assert made.candidates.drafted.prospect(1, [1.0] * 20) == before
        assert made.attach(["r"], 0, 100.22).tokens["r"][0] == 8
        promised.add(made.candidates.drafted.prospect(1, [1.0] * 20))
        assert before not in promised
    assert len(promised) == 2


def test_nothing_is_asked_early_where_the_outcome_decides() -> None:
    made, _ = one("ahead")
    assert made.attach(["r"], 0, 100.2).asks == {}, "it may be drafted for already"
    repeating, text = one(lookups=True)
    text += [1, 2, 3, 4, 5, 6]
    repeating.learn()
    attached = repeating.attach(["r"], 0, 100.3)
    assert attached.tokens
    assert attached.asks == {}, "its own text may go on so"


def test_nobody_waits_for_a_draft_that_a_look_up_has_replaced() -> None:
    made, text = one(lookups=True)
    assert made.attach(["r"], 0, 100.2).asks
    text += [1, 2, 3, 4, 5, 6]
    made.ended("r", text, 6, 100.21)
    made.learn()
    assert made.ask(100.21) == {}
    assert made.hold(["r"], 0, 100.21) is None
    assert made.arrived("d0", [Draft("r", 12, [9, 9])], 1e-3, 100.22)[0][0] == "ready"


def test_drafts_asked_for_before_drafters_were_given_up_are_not_waited_for() -> None:
    made, text = speculator("auto"), [1, 2, 3, 4, 5, 6]
    made.ended("r", text, 5, 100.0)
    made._asking.choice = Choice(Ask.DRAFT, K, 0.0)
    while not made.attach(["r"], 0, 100.2).asks:
        """A probe."""
    made._asking.choice = NOTHING
    text.append(7)
    made.ended("r", text, 6, 100.21)
    assert made.ask(100.21) == {}
    assert made.hold(["r"], 0, 100.21) is None
