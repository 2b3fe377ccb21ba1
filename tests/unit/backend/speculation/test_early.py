"""Which steps may begin before the text of the one before is known."""

from __future__ import annotations

import itertools

import pytest

from backend.speculation.candidates import RESTS_AFTER
from backend.speculation.chances import Rule
from backend.speculation.waiting import PROBE_EVERY, PROBE_STEPS, Ask
from backend.wire.drafting import Draft
from backend.wire.engine import RequestOptions
from tests.support.driven_speculator import Drafter, Driven, speculator


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
    while not (driven.step().is_early and not driven.speculator.may_be_early() and not driven.speculator._asking.probes_next):
        pass
    at = {name: len(text) for name, text in driven.texts.items()}
    assert not driven.step().is_early
    assert {name: request.looked_up_at for name, request in driven.speculator.candidates.requests.items()} == at


@pytest.mark.parametrize("asked", [RequestOptions(mode="sync"), RequestOptions(mode="ahead"), RequestOptions(prediction=[1])])
def test_no_step_begins_early_for_a_request_that_wants_drafts(asked: RequestOptions) -> None:
    driven = Driven(speculator("auto", lookups=True), Drafter(0.02), requests=24, early=True)
    while not driven.step().is_early or not driven.speculator.may_be_early():
        pass
    driven.speculator.candidates.asked("new", asked, 3)
    driven.speculator.ended("new", [1, 2, 3], 2, Rule.GREEDY, 100.0)
    assert not driven.speculator.may_be_early()


def test_drafts_that_come_late_are_looked_at_before_another_step_begins_early() -> None:
    driven = Driven(speculator("auto", lookups=True), Drafter(0.02), requests=24, early=True)
    while not driven.step().is_early or not driven.speculator.may_be_early():
        pass
    driven.speculator.arrived("d0", [Draft("r0", len(driven.texts["r0"]), [1])], 1e-3, driven.now)
    assert not driven.speculator.may_be_early()
