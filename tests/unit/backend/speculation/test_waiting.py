"""A step waits, and drafters are asked, where that emits more per second."""

from functools import partial
from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backend.speculation.budget import spend, survivals
from backend.speculation.outlook import Foresight, Outlook, Prospect
from backend.speculation.waiting import (
    PROBE_EVERY,
    PROBE_STEPS,
    Ask,
    Asking,
    Pending,
    Promises,
    StepLoad,
    Times,
    bearable_s,
    goodputs,
    waiting_pays,
)
from tests.support.speculator import spent_on

NONE = Prospect((0.0,) * 5, (0.0,) * 5)
NOTHING = Prospect((0.0,) * 2, (0.0,) * 2)
GOOD = Prospect((0.0, 1.0, 2.0, 3.0, 4.0), (0.0, 0.9, 1.7, 2.4, 3.0))


def flat(base: float, drafted: float = 0.0) -> float:
    return 6e-3


def test_outlooks_put_what_came_through_the_budget_of_the_load() -> None:
    outlook = Outlook(4)
    for step in range(10):
        outlook.note(survivals([0.8] * 4), step)
        outlook.note([], step)
    free = outlook.prospect(4, [1.0] * 18)
    assert free.tokens == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert free.gains[4] == pytest.approx((0.8 + 0.64 + 0.512 + 0.4096) / 2)
    assert outlook.prospect(4, [4.0 + n for n in range(18)]).tokens[4] == 0.0
    seldom = outlook.prospect(4, [1.0] * 18, every=4)
    assert (seldom.tokens[4], seldom.gains[4], seldom.share) == (0.5, free.gains[4] / 4, 0.25)


@given(st.lists(st.lists(st.floats(0.01, 0.99), max_size=4).map(survivals), min_size=1, max_size=32), st.integers(1, 6))
def test_look_ups_that_seldom_pay_do_not_make_plain_steps_look_slow(rows: list[list[float]], requests: int) -> None:
    """Verifying has a price of its own.  If steps without drafts were charged for it, drafters would be asked instead."""

    def step_s(base: float, drafted: float) -> float:
        return 5e-3 + 2e-3 * min(drafted, 1.0) + 1e-4 * (base + drafted)

    outlook = Outlook(4)
    for step, row in enumerate(rows):
        outlook.note(row, step)
    alone = outlook.prospect(requests, [step_s(requests, drafted) for drafted in range(4 * requests + 2)])
    times = Times(step_s, step_s, lambda rows, k: 1.0, lambda rows, k: 1.0)
    plain = goodputs(StepLoad(requests, alone, alone, seeing(0.0)), times)[Ask.PLAIN].tokens_per_s
    assert plain >= requests / step_s(requests, 0) * (1 - 1e-9)
    # Tokens of look-ups cost their time also where no draft of a drafter would be verified.
    assert Prospect((0.0, 0.0), (0.0, 0.0), 0.0).seconds(step_s, requests, 1.0) == step_s(requests, requests)


def test_outlooks_begin_with_what_is_believed_and_forget_what_is_old() -> None:
    outlook = Outlook(2, [0.6, 0.3])
    assert outlook.prospect(3, [1.0] * 8).gains == pytest.approx((0.0, 0.6, 0.9))
    for _ in range(40):
        outlook.note([0.9, 0.9], 0)
    for _ in range(8):
        outlook.note([0.1, 0.1], 10_000)
    assert outlook.prospect(1, [1.0] * 4).gains[2] == pytest.approx(0.2)


def test_what_a_drafter_left_out_goes_on_falling() -> None:
    outlook = Outlook(4)
    outlook.note([0.8, 0.4], 0)
    assert outlook.prospect(1, [1.0] * 6).gains == pytest.approx((0.0, 0.8, 1.2, 1.4, 1.5))


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=4).map(survivals), min_size=1, max_size=8),
    st.floats(0, 1e-3),
    st.floats(0, 2e-2),
    st.floats(0, 2e-2),
)
def test_waiting_pays_where_more_is_emitted_per_second(
    rows: list[list[float]], per_token: float, draft_s: float, waited_s: float
) -> None:
    def step_s(base: float, drafted: float = 0.0) -> float:
        return 5e-3 + per_token * (base + drafted)

    n = len(rows)
    spent = spent_on(rows, step_s, n)
    out = [i for i in range(n) if sum(rows[i][: spent.lengths[i]]) < GOOD.gains[3]]
    full = spent.gained + sum(GOOD.gains[3] - sum(rows[i][: spent.lengths[i]]) for i in out)
    tokens = n + spent.tokens + sum(3 - spent.lengths[i] for i in out)
    going, waiting = (n + spent.gained) / spent.seconds, (n + full) / (step_s(tokens) + abs(draft_s - waited_s))
    pays = waiting_pays(spent, rows, Pending(range(n), 3, draft_s, waited_s), GOOD, step_s)
    assert pays == (bool(out) and waiting > going) or waiting == pytest.approx(going)


def at_once(rows: float, k: int) -> float:
    return 0.0


def seeing(rate: float) -> Foresight:
    """Drafting ahead for one outcome, which happens so often."""
    foresight = Foresight(1, 4)
    foresight._hits, foresight._looks = [[100 * rate]] * 5, [[100.0]] * 5
    return foresight


def draft_s(rows: float, k: int) -> float:
    return 1e-3 + 3e-4 * (k + 1) if rows else 0.0


TIMES = Times(flat, flat, draft_s, at_once)


def test_nothing_pays_more_than_what_is_promised() -> None:
    offers = goodputs(StepLoad(4, NONE, GOOD, seeing(0.5)), TIMES)
    assert offers[Ask.PLAIN].tokens_per_s == pytest.approx(4 / 6e-3)
    assert offers[Ask.DRAFT].tokens_per_s == pytest.approx(
        max(4 * (1 + GOOD.gains[k]) / (6e-3 + draft_s(4, k)) for k in range(1, 5))
    )
    assert offers[Ask.AHEAD].tokens_per_s > offers[Ask.DRAFT].tokens_per_s
    slow = goodputs(StepLoad(4, NONE, GOOD, seeing(0.0)), TIMES._replace(draft=lambda rows, k: 4e-3 * (k + 1)))
    assert slow[Ask.DRAFT].k < offers[Ask.DRAFT].k, "slow passes make short drafts"
    certain = goodputs(StepLoad(4, NONE, GOOD, seeing(1.0)), TIMES)[Ask.AHEAD]
    assert certain.tokens_per_s == pytest.approx(16 / 6e-3)
    assert certain.k == 4


def test_ahead_waits_whenever_one_outcome_of_all_was_missed() -> None:
    """Four requests: fifteen steps in sixteen wait, for the drafts of 2 / (15 / 16) requests."""

    def by_row(rows: float, k: int) -> float:
        return 3e-4 * rows

    offer = goodputs(StepLoad(4, NONE, GOOD, seeing(0.5)), Times(flat, flat, by_row, at_once))[Ask.AHEAD]
    assert offer.tokens_per_s == pytest.approx(16 / (6e-3 + 2 * 3e-4))
    dear = goodputs(StepLoad(4, NONE, GOOD, seeing(0.5)), Times(flat, flat, lambda rows, k: 2e-3, at_once))[Ask.AHEAD]
    assert dear.tokens_per_s == pytest.approx(16 / (6e-3 + 15 / 16 * 2e-3))


def test_a_small_promise_changes_nothing_and_ties_ask_nobody() -> None:
    asking = Asking()
    assert Asking().choose(StepLoad(4, NONE, GOOD, seeing(0.0)), TIMES).ask == Ask.DRAFT
    for gain in (0.0, 0.015, 0.03):
        some = Prospect((0.0, 1.0), (0.0, gain))
        assert asking.choose(StepLoad(4, NOTHING, some, seeing(1.0)), TIMES).ask == Ask.PLAIN
    assert asking.choose(StepLoad(4, NONE, GOOD, seeing(1.0)), TIMES).ask == Ask.AHEAD
    slightly = Prospect((0.0, 1.0), (0.0, 0.03))
    assert asking.choose(StepLoad(4, NOTHING, slightly, seeing(1.0)), TIMES).ask == Ask.AHEAD
    assert asking.choose(StepLoad(4, NONE, NONE, seeing(1.0)), TIMES).ask == Ask.PLAIN


def test_probes_are_few_and_there_are_none_while_drafts_are_made_ahead() -> None:
    asking = Asking()
    assert sum(asking.stepped() for _ in range(PROBE_EVERY)) == PROBE_STEPS
    asking.choose(StepLoad(4, NONE, GOOD, seeing(1.0)), TIMES)
    assert not any(asking.stepped() for _ in range(PROBE_EVERY))


def test_hits_are_counted_from_a_hopeful_start() -> None:
    hits = Foresight(4, 2)
    assert hits.choices == [1, 2, 4]
    assert hits.rate(4, 1) == pytest.approx(0.75 * (1 - 1 / 8))
    for _ in range(500):
        hits.observe(None, 4, 1)
    assert hits.rate(4, 1) < 0.05


def test_how_often_the_first_few_suffice_is_known_from_where_hits_were() -> None:
    hits = Foresight(8, 2)
    for i in range(2000):
        hits.observe((0, 0, 2, None)[i % 4], 4, 1)
    assert hits.rate(1, 1) == pytest.approx(0.5, abs=0.02)
    assert hits.rate(2, 1) == pytest.approx(0.5, abs=0.02)
    assert hits.rate(4, 1) == pytest.approx(0.75, abs=0.03)
    assert hits.rate(8, 1) <= hits.rate(4, 1) + 0.15, "what was not asked for is hoped for, a little"


def test_twice_as_many_outcomes_may_be_asked_for_as_were_looked_at() -> None:
    hits = Foresight(64, 2)
    assert hits.choices == [1, 2, 4, 8]
    hits.observe(None, 8, 2)
    assert hits.choices == [1, 2, 4, 8, 16]
    hits.observe(40, 64, 1)
    assert hits.choices[-1] == 64


def test_long_verifications_are_foreseen_less_often_than_short_ones() -> None:
    hits = Foresight(4, 4)
    for i in range(500):
        hits.observe(0, 4, 1)
        hits.observe(None if i % 2 else 0, 4, 3)
    assert hits.rate(4, 1) > 0.95
    assert hits.rate(4, 3) == pytest.approx(0.5, abs=0.05)
    assert hits.rate(4, 0.4) == pytest.approx(0.6 * hits.rate(4, 0) + 0.4 * hits.rate(4, 1))
    assert hits.rate(4, 4.0) == Foresight(4, 4).rate(4, 4), "what was never verified is hoped for"


def test_fewer_outcomes_are_asked_for_where_they_would_outlast_the_step() -> None:
    slow = Times(flat, flat, draft_s, lambda rows, k: rows * 1e-2)
    few = goodputs(StepLoad(4, NONE, GOOD, Foresight(8, 4)), slow)[Ask.AHEAD]
    many = goodputs(StepLoad(4, NONE, GOOD, Foresight(8, 4)), slow._replace(enumerate=at_once))[Ask.AHEAD]
    assert few.outcomes < many.outcomes
    assert few.tokens_per_s < many.tokens_per_s


@pytest.mark.parametrize(
    ("pass_s", "miss_k", "gained"),
    [
        pytest.param(2.2e-3, 0, 0.0, id="steps go on without"),
        pytest.param(3e-4, 2, 1.4, id="they wait for a short one"),
        pytest.param(1e-5, 4, 2.0, id="they wait for a whole one"),
    ],
)
def test_a_draft_for_a_miss_is_as_long_as_pays(pass_s: float, miss_k: int, gained: float) -> None:
    def passes(rows: float, k: int) -> float:
        return pass_s * (k + 1) if rows else 0.0

    long = Prospect((0.0, 1.0, 2.0, 3.0, 4.0), (0.0, 0.8, 1.4, 1.8, 2.0))
    times = TIMES._replace(draft=passes, enumerate=lambda rows, k: 5.9e-3)
    chosen = goodputs(StepLoad(16, NONE, long, seeing(0.7)), times)[Ask.AHEAD]
    assert (chosen.k, chosen.miss_k) == (4, miss_k)
    # Seven in ten are hits.
    waited_s = passes(1, miss_k) if miss_k else 0.0
    assert chosen.tokens_per_s == pytest.approx(16 * (1 + 0.7 * 2.0 + 0.3 * gained) / (6e-3 + waited_s), rel=0.01)


def test_drafts_made_ahead_count_by_their_own_worth() -> None:
    useless = Prospect((0.0, *GOOD.tokens[1:]), (0.0,) * len(GOOD.gains))
    offers = goodputs(StepLoad(4, NONE, GOOD, seeing(0.7), useless), TIMES)
    alike = goodputs(StepLoad(4, NONE, GOOD, seeing(0.7), GOOD), TIMES)
    assert offers[Ask.DRAFT] == alike[Ask.DRAFT]
    assert offers[Ask.AHEAD].tokens_per_s < offers[Ask.DRAFT].tokens_per_s < alike[Ask.AHEAD].tokens_per_s


def lasting(seconds: float, rows: float, k: int) -> float:
    return seconds


def test_an_enumeration_that_outlasts_the_step_is_waited_for_as_long_as_it_pays() -> None:
    load = StepLoad(4, NONE, GOOD, seeing(1.0))
    for enumerated_s in (6e-3, 8e-3):
        times = TIMES._replace(enumerate=partial(lasting, enumerated_s))
        chosen = goodputs(load, times)[Ask.AHEAD]
        assert chosen.tokens_per_s == pytest.approx(16 / enumerated_s)
        # Drafts bring three tokens, so a step of 24 ms in all would be no faster than three without.
        assert bearable_s(load, chosen, times) == pytest.approx(enumerated_s + 3 * 6e-3)


def test_a_kind_that_does_not_keep_its_promises_is_left_and_later_tried_again() -> None:
    """Its parts are measured well, and together they bring half."""
    asking, load = Asking(), StepLoad(4, NONE, GOOD, seeing(0.0))
    times = Times(flat, flat, draft_s, lambda rows, k: 1.0)
    first = asking.choose(load, times)
    assert first.ask == Ask.DRAFT
    windows = 0
    while asking.choose(load, times, None, 0.05 * asking.choice.tokens_per_s, 1000).ask == Ask.DRAFT:
        windows += 1
        assert windows < 8
    for _ in range(400):
        if asking.choose(load, times, None, asking.choice.tokens_per_s / 4, 1000).ask == Ask.DRAFT:
            break
    assert asking.choice.ask == Ask.DRAFT


def test_what_was_promised_to_many_is_not_asked_of_few() -> None:
    asking, times = Asking(), Times(flat, flat, draft_s, lambda rows, k: 1.0)
    ask = asking.choose(StepLoad(16, NONE, GOOD, seeing(0.0)), times).ask
    asking.choose(StepLoad(1, NONE, GOOD, seeing(0.0)), times, None, 1.0, 1000)
    assert asking.promises.correction(ask) == 1.0


def test_a_few_tokens_say_little_of_a_kind() -> None:
    few = Promises()
    few.observe(Ask.DRAFT, 100, 50, 20)
    assert 0.8 < few.correction(Ask.DRAFT) < 1


def test_plain_steps_have_a_record_and_both_kinds_of_asking_share_one() -> None:
    promises = Promises()
    for _ in range(20):
        promises.observe(Ask.PLAIN, 100, 100, 1000)
        promises.observe(Ask.AHEAD, 100, 80, 1000)
    assert promises.correction(Ask.DRAFT) == promises.correction(Ask.AHEAD) == pytest.approx(0.8, abs=0.03)
    for _ in range(3):
        promises.observe(Ask.PLAIN, 100, 55, 1000)
    assert promises.correction(Ask.AHEAD) == pytest.approx(0.8, abs=0.04)
    assert 0.7 < promises.correction(Ask.PLAIN) < 0.9, "a slow minute"
    for _ in range(400):
        promises.observe(Ask.AHEAD, 100, 80, 1000)
    assert promises.correction(Ask.PLAIN) == pytest.approx(1, abs=0.01), "and it is forgotten while plain steps are not seen"


@given(
    st.lists(st.lists(st.floats(0.01, 1), max_size=4), min_size=1, max_size=12),
    st.integers(1, 5),
    st.lists(st.floats(0.001, 0.5), min_size=22, max_size=22),
)
def test_an_outlook_spends_as_the_budget_does(chances: list[list[float]], requests: int, rises: list[float]) -> None:
    k, times = 4, [1 + sum(rises[:n]) for n in range(len(rises))]
    outlook, rows = Outlook(k), []
    for step, each in enumerate(chances):
        outlook.note(survivals(each), step)
        rows.append(outlook._rows[-1][1])
    dealt = [rows[i % len(rows)] for i in range(max(-(-len(rows) // requests), 1) * requests)]
    tokens, gained = 0, 0.0
    for start in range(0, len(dealt), requests):
        drafts = dealt[start : start + requests]
        emitted = accumulate(sorted((s for row in drafts for s in row), reverse=True), initial=requests)
        rates = sorted(emitted / seconds for emitted, seconds in zip(emitted, times, strict=False))
        assume(len(rates) == 1 or rates[-2] < rates[-1] * (1 - 1e-9))  # rounding decides between equals
        spent = spend(drafts, times)
        tokens, gained = tokens + spent.tokens, gained + spent.gained
    found = outlook.prospect(requests, times)
    assert found.tokens[k] * len(dealt) == pytest.approx(tokens)
    assert found.gains[k] * len(dealt) == pytest.approx(gained)
