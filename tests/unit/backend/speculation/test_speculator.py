"""What is attached, asked for, waited for and learned, whatever drafters say and whenever they say it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.fleet import LOOKUP
from backend.speculation.calibration import Calibration
from backend.speculation.candidate import rank_of
from backend.speculation.candidates import INDEXED_PER_STEP
from backend.speculation.chances import Rule
from backend.speculation.speculator import RECONSIDER_EVERY
from backend.speculation.waiting import PROBE_EVERY, PROBE_STEPS, Ask
from backend.wire.drafting import Block, Draft, NextItem, Outcome
from backend.wire.engine import EmittedText
from tests.unit.backend.speculation.driven import (
    LONGEST_WAIT_S,
    VOCAB,
    Drafter,
    Driven,
    K,
    all_asks,
    one,
    sampled,
    speculator,
)


@given(
    st.lists(st.integers(0, 2), max_size=3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=6, unique=True),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_the_outcome_that_was_said_is_found_and_no_other(
    verifying: list[int], ends: list[tuple[int, int]], emitted: list[int]
) -> None:
    outcomes = [
        Outcome(accepted, token, [i], [0.5, 0.5]) for i, (accepted, token) in enumerate(ends) if accepted <= len(verifying)
    ]
    expected = [rank for rank, o in enumerate(outcomes) if [*verifying[: o.accepted], o.token] == emitted]
    assert rank_of(Block("r", 9, verifying, outcomes), emitted) == (expected[0] if expected else None)


def test_sync_waits_for_drafts_up_to_their_deadline() -> None:
    made, _ = one()
    assert made.hold(["r"], 0, 100.0) == pytest.approx(100 + LONGEST_WAIT_S)
    assert made.hold(["r"], 5000, 100.05) == pytest.approx(100 + LONGEST_WAIT_S), "beside a long prompt, too"
    assert made.arrived("d0", [Draft("r", 6, [7, 8], [8.0] * 4)], 1e-3, 100.06)[0][0] == "ready"
    assert made.hold(["r"], 0, 100.06) is None
    assert made.attach(["r"], 0, 100.06).tokens == {"r": [7, 8]}
    late, _ = one()
    assert late.hold(["r"], 0, 100 + LONGEST_WAIT_S) is None
    assert late.attach(["r"], 0, 100 + LONGEST_WAIT_S).lost == ["d0"]


@pytest.mark.parametrize(("token", "verdict", "left"), [(7, "ready", {"r": [9]}), (6, "late", {})])
def test_of_what_comes_late_the_rest_is_verified_if_it_still_fits(token: int, verdict: str, left: dict[str, list[int]]) -> None:
    made, text = one()
    made.attach(["r"], 0, 100.2)
    text.append(token)
    made.ended("r", text, 6, 100.0)
    assert made.arrived("d0", [Draft("r", 6, [7, 9], [8.0] * 4)], 1e-3, 100.21)[0][0] == verdict
    made.ask(100.21)
    assert made.attach(["r"], 0, 100.22).tokens == left


def test_what_is_not_verified_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[tuple[int, int]] = []
    monkeypatch.setattr(Calibration, "observe", lambda self, own, signs, matched, seen: observed.append((matched, seen)))
    made, text = one()
    made.attach(["r"], 0, 100.2)
    text.append(7)
    made.ended("r", text, 6, 100.0)
    made.ask(100.2)
    made.arrived("d0", [Draft("r", 6, [7, 9])], 1e-3, 100.21)
    text.append(8)
    made.ended("r", text, 7, 100.0)
    made.ask(100.22)
    made.learn()
    assert observed == [(1, 2)], "seven was right, nine was not"


@pytest.mark.parametrize("mode", ["sync", "ahead"])
def test_a_preempted_request_is_asked_for_anew_and_waits_for_nothing_older(mode: str) -> None:
    made, text = one(mode)
    made.arrived("d0", [Draft("r", 6, [7, 8], [8.0] * 4)], 1e-4, 100.0001)
    made.release("r")
    assert made.attach([], 0, 100.0002).tokens == {}
    text.append(7)
    made.ended("r", text, 6, 100.0003)
    assert [item.base_len for item in made.ask(100.0003)["d0"]] == [7]
    assert made.attach(["r"], 0, 100.0004).tokens == {}


def test_a_drafter_may_have_nothing_to_say() -> None:
    made, _ = one()
    expected = made.load.drafted.gains[K]
    ((verdict, waited_s),) = made.arrived("d0", [Draft("r", 6, [])], 1e-3, 100.01)
    assert verdict == "ready"
    assert waited_s == pytest.approx(0.01)
    assert made.hold(["r"], 0, 100.01) is None
    assert made.attach(["r"], 0, 100.01).tokens == {}
    made.set_drafters({"d0": ""})
    assert made.load.drafted.gains[K] < expected, "that counts, too"


@pytest.mark.parametrize(("began", "draft_s"), [(100.001, 2e-3), (100.02, 0.0195)])
def test_a_drafter_is_not_as_slow_as_the_step_during_which_it_answers(began: float, draft_s: float) -> None:
    """Until the step began it had not answered."""
    made, text = one("ahead")
    made.attach(["r"], 0, began)
    made.stepped(1, 0, 1.0, 0.0)
    made.timed(1, K, 2e-3, 5e-4, 0.03, 100.03)
    made.take_blocks("d0", [Block("r", 6, [], [])], 1e-3, 100.03)
    text.append(7)
    made.ended("r", text, 6, 100.03)
    made.ask(100.03)
    assert made.hold(["r"], 0, 100.03) == pytest.approx(100.03 + draft_s)


def settled(drafter: Drafter) -> Driven:
    """Mode `auto`, after it has seen enough."""
    driven = Driven(speculator("auto"), drafter)
    driven.run(200 + 2 * PROBE_EVERY)
    return driven


def test_a_useless_drafter_is_only_probed_and_never_waited_for() -> None:
    driven = settled(Drafter(0.02))
    assert driven.speculator.choice.ask == Ask.PLAIN
    driven.speculator.whole._floor = 0.9
    turns = driven.run(2 * PROBE_EVERY)
    assert sum(bool(turn.asks) for turn in turns) == 2 * PROBE_STEPS
    assert all(item.floor == 0 for turn in turns for item in turn.asks), "a probe wants to see the whole draft"
    assert all(turn.waited_s == 0 for turn in turns)
    assert sum(len(turn.attached.tokens) for turn in turns) < len(turns) // 10


def test_nothing_is_missed_of_quiet_steps() -> None:
    """Whether or not the speculator is told of each request's tokens, it does the same."""
    for drafter, period in ((Drafter(0.02), 0), (Drafter(0.02), 500)):
        silent, informed = (
            Driven(speculator("auto", lookups=True), replace(drafter), requests=24, period=period, tells_all=each)
            for each in (False, True)
        )
        turns = silent.run(3 * PROBE_EVERY)
        assert turns == informed.run(3 * PROBE_EVERY)
        assert sum(turn.attached.is_quiet for turn in turns) > PROBE_EVERY
        assert silent.speculator.choice == informed.speculator.choice


def test_a_drafter_that_got_better_is_found_by_its_probes() -> None:
    driven = settled(Drafter(0.02))
    driven.drafter.right = 0.9
    driven.run(3 * PROBE_EVERY)
    assert driven.speculator.choice.ask != Ask.PLAIN
    assert sum(turn.accepted for turn in driven.run(20)) > 20 * 4 * 2


def test_a_drafter_that_falls_silent_is_soon_not_waited_for() -> None:
    driven = settled(Drafter(0.6, draft_s=2e-3))
    driven.drafter.silent = True
    driven.run(RECOGNISED)
    assert sum(turn.waited_s for turn in driven.run(100)) < 0.05 * 100 * 5e-3


RECOGNISED = 50
"""Steps within which silence must have been recognised."""


def test_nobody_waits_for_a_probe() -> None:
    made, text = speculator("auto"), [1, 2, 3]
    made.ended("r", text, 2, 100.0)
    assert made.ask(100.0) == {}, "nothing is known yet: plain steps"
    made.step_times.observe(1, 0.05)
    made.timed(1, K, 1e-3, 0.0, 1e-3, 100.0)
    attached = made.attach(["r"], 0, 100.0)
    text.append(4)
    made.ended("r", text, 3, 100.0)
    assert all_asks(made, attached, 100.01), "the first steps probe"
    assert made.hold(["r"], 0, 100.01) is None
    assert made.arrived("d0", [Draft("r", 4, [5, 6], [8.0] * 4)], 1e-3, 100.011)[0][0] == "ready"
    assert made.attach(["r"], 0, 100.012).tokens == {"r": [5, 6]}, "but what comes in time is used"


def test_a_draft_that_comes_after_a_probe_is_used_though_look_ups_rest() -> None:
    made, texts = speculator("auto"), {f"r{i}": [i, 1, 2] for i in range(2 * RECONSIDER_EVERY)}
    for name, text in texts.items():
        made.ended(name, text, 2, 100.0)
    asks: list[NextItem] = []
    for step in range(PROBE_EVERY + PROBE_STEPS - 1):
        attached = made.attach(texts, 0, 100.0 + step)
        assert not attached.tokens
        for name, text in texts.items():
            text.append(4)
            made.ended(name, text, len(text) - 1, 100.0)
        asks = all_asks(made, attached, 100.5 + step).get("d0", [])
        made.learn()
    assert len(asks) == len(texts)
    made.arrived("d0", [Draft("r0", asks[0].base_len, [5, 6], [8.0] * 4)], 1e-3, 1000.0)
    assert made.candidates.asleep
    attached = made.attach(texts, 0, 1000.0)
    assert not attached.features_needed, "the probe is over"
    assert attached.tokens == {"r0": [5, 6]}


def test_a_draft_made_ahead_for_the_end_of_a_probe_is_used_at_once_or_never() -> None:
    made, texts = speculator("auto"), {f"r{i}": [i, 1, 2] for i in range(2 * RECONSIDER_EVERY)}
    for name, text in texts.items():
        made.ended(name, text, 2, 100.0)
    used = 0
    for step in range(3 * PROBE_EVERY):
        attached = made.attach(texts, 0, 100.0 + step)
        for name, tokens in attached.tokens.items():
            assert tokens == [len(texts[name]) % VOCAB], "made for this length"
        used += len(attached.tokens) * (not attached.features_needed)
        for name, text in texts.items():
            text.append(4)
            if not attached.is_quiet:
                made.ended(name, text, len(text) - 1, 100.0)
        asks = all_asks(made, attached, 100.5 + step).get("d0", [])
        # One request's alone.
        ahead = [Block("r0", each.base_len, [], [Outcome(0, 4, [(each.base_len + 1) % VOCAB], [8.0] * 2)]) for each in asks[:1]]
        made.take_blocks("d0", ahead, 1e-3, 100.0)
        made.learn()
        if attached.is_quiet:
            made.arrived("d0", [Draft("r0", 1, [])], 1e-3, 100.5 + step)
    assert used


def test_what_is_left_of_a_cut_draft_is_verified_next() -> None:
    made, text = one("ahead")
    made.attach(["r"], 0, 100.001)
    text += [7]
    made.ended("r", text, 6, 100.0)
    made.take_blocks("d0", [Block("r", 6, [], [Outcome(0, 7, [8, 9, 10, 11])])], 1e-3, 100.0)
    assert made.ask(100.01)["d0"][0].verifying == [8, 9, 10, 11]
    made.attach(["r"], 0, 100.011)
    text += [8, 9]
    made.ended("r", text, 7, 100.0)
    assert made.ask(100.02)["d0"][0].verifying == [10, 11]
    assert made.attach(["r"], 0, 100.02).tokens == {"r": [10, 11]}


@pytest.mark.parametrize("room", [0, 1])
def test_the_rest_of_a_sampled_draft_is_used_after_a_step_that_verified_a_part_or_nothing(room: int) -> None:
    """Also of one that was asked for because no outcome had been foreseen, and whatever an earlier step verified."""
    made, text = one("ahead", rule=Rule.INDEPENDENT)
    made.arrived("d0", [sampled(6, [8, 9])], 1e-3, 100.21)
    assert made.attach(["r"], 0, 100.22).tokens == {"r": [8, 9]}
    text += [8, 9, 10]
    made.ended("r", text, 6, 100.23)
    assert made.ask(100.23)["d0"][0].verifying == []
    made.arrived("d0", [sampled(9, [11, 12, 13])], 1e-3, 100.24)
    made.attach(["r"], 0, 100.25, limits={"r": room})
    text += [11, 12][: room + 1]
    made.ended("r", text, 9, 100.26)
    assert made.ask(100.26)["d0"][0].verifying, "drafts are made for what may come behind the rest"
    assert made.attach(["r"], 0, 100.27).tokens == {"r": [12, 13][room:]}


def test_the_rest_of_a_sampled_draft_is_dropped_where_a_token_was_rejected() -> None:
    made, text = one("ahead", rule=Rule.INDEPENDENT)
    made.arrived("d0", [sampled(6, [8, 9, 10])], 1e-3, 100.21)
    assert made.attach(["r"], 0, 100.22, limits={"r": 2}).tokens == {"r": [8, 9]}
    text += [8]  # The verifier's own token after the rejected first one is the same by chance.
    made.ended("r", text, 6, 100.23)
    assert made.ask(100.23)["d0"][0].verifying == []
    assert made.attach(["r"], 0, 100.24).tokens == {}


def test_nothing_is_left_of_a_draft_of_long_ago() -> None:
    made, text = speculator("auto"), [1, 2, 3]
    for step in range(PROBE_EVERY + 2):
        now = 100.0 + step
        attached = made.attach(["r"], 0, now)
        assert step < 2 * PROBE_STEPS or not attached.tokens, "that was drafted for the last probe"
        text.append(9)
        made.ended("r", text, len(text) - 1, 100.0)
        items = all_asks(made, attached, now + 0.1).get("d0", [])
        if step == PROBE_STEPS - 3:
            blocks = [Block("r", item.base_len, item.verifying, [Outcome(0, 9, [9, 8, 8])]) for item in items]
            made.take_blocks("d0", blocks, 1e-3, 100.0)


def test_a_request_that_repeats_itself_drafts_better_than_a_bad_drafter() -> None:
    for mode in ("sync", "auto"):
        driven = Driven(speculator(mode, lookups=True), Drafter(0.1), period=13)
        driven.run(150)
        turns = driven.run(50)
        sources = {driven.speculator.verified(name).source.drafter_id for name in turns[-1].attached.tokens}  # type: ignore[union-attr]
        assert sources == {LOOKUP}
        assert sum(turn.accepted for turn in turns) > 0.95 * K * len(turns) * driven.requests
        assert sum(turn.waited_s for turn in turns) == 0, "what it has available is better than what it could wait for"


def test_steps_without_drafters_are_not_held_against_an_offer() -> None:
    driven = settled(Drafter(0.9))
    ask = driven.speculator.choice.ask
    driven.speculator.set_drafters({})
    driven.run(500)
    driven.speculator.set_drafters({"d0": ""})
    driven.run(RECONSIDER_EVERY)
    assert driven.speculator.choice.ask == ask


def test_in_an_overloaded_batch_every_request_and_others_outputs_are_indexed_in_turn() -> None:
    made, texts = speculator(lookups=True), {f"r{i}": [100 + i] for i in range(4)}
    made.candidates.share(EmittedText("", [1, 2, 3, 4, 5], [6, 7, 8, 9]))
    for step in range(4):
        for text in texts.values():
            text += text[:1] * INDEXED_PER_STEP
        for name, text in texts.items():
            made.ended(name, text, len(text) - INDEXED_PER_STEP, 100.0)
        made.attach(texts, 0, 100.0 + step)
        made.ask(100.0 + step)
        made.learn()
    assert all(made.candidates.requests[name].texts[0].propose(text, 1)[0] for name, text in texts.items())
    reader = made.candidates.requests["r0"].texts[1]
    assert reader.propose([*texts["r0"], 2, 3, 4, 5], 2)[0] == [6, 7]


def test_a_load_that_grows_is_reconsidered_at_once() -> None:
    """Drafts pay for one request, and not for many: at the start of each batch, drafting must end with the last one's tail."""
    driven = Driven(speculator(), Drafter(0.5), requests=32, token_s=3e-4)
    driven.run(200)
    assert driven.speculator._asking.choice.ask == Ask.PLAIN
    for _ in range(3):
        others = {name: driven.texts.pop(name) for name in list(driven.texts)[1:]}
        for name in others:
            driven.speculator.finish(name)
        driven.run(2)
        assert driven.speculator._asking.choice.ask != Ask.PLAIN
        driven.texts |= others
        for name, text in others.items():
            driven.speculator.ended(name, text, len(text) - 1, driven.now)
        turns = driven.run(40)
        assert driven.speculator._asking.choice.ask == Ask.PLAIN
        assert all(not turn.attached.features_needed for turn in turns[2:]), "nor does a probe follow at once"
