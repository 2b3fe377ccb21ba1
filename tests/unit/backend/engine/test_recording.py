"""Rows, accounts and times made from what a scheduler reports.

That rows add up to the stats is shown in `tests/integration/engines/test_records.py`.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from backend.engine.counting import Counters, CountingScheduler
from backend.engine.observers import UNDRAFTED, Accounts, DraftOrigin, Observer, RequestState, Verification, open_account
from backend.engine.recording import Recording
from backend.fleet import VerifierStats
from backend.records.rows import (
    LONGEST_REQUEST_ID,
    REQUEST_ID_KEY,
    DecisionRow,
    RequestRow,
    Row,
    StepRow,
    VerificationRow,
    name_for_records,
)
from backend.speculation.chances import Rule
from backend.speculation.outlook import Foresight, Prospect
from backend.speculation.waiting import Ask, Choice, Plan, StepLoad
from backend.wire.engine import Account, RequestOptions, Tally


class Kept:
    """All rows in order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def of(self, kind: type) -> list:
        return [row for row in self.rows if isinstance(row, kind)]


def asked(name: str, arrived_at: float, prompt_tokens: int, **arguments: object) -> SimpleNamespace:
    params = SimpleNamespace(extra_args=arguments)
    return SimpleNamespace(
        request_id=name,
        sampling_params=params,
        arrival_time=arrived_at,
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=0,
    )


def step(recording: Recording, stats: VerifierStats, busy_s: float = 0.01, plan: Plan = Plan(4)) -> None:  # noqa: B008
    stats.verify_s += busy_s / 2
    stats.busy_s += busy_s
    stats.steps += 1
    recording.stepped(scheduling(stats, plan), busy_s)


def scheduling(stats: VerifierStats, plan: Plan) -> SimpleNamespace:
    return SimpleNamespace(
        counters=Counters(stats),
        plan_in_force=lambda: plan,
        get_request_counts=lambda: (1, 3),
        get_kv_cache_usage=lambda: 0.25,
    )


def made() -> tuple[Kept, Recording, VerifierStats]:
    kept = Kept()
    stats = VerifierStats("v0", 0.0, "sync", 4)
    return kept, Recording(kept.rows.append, stats), stats


def test_a_request_from_prefill_to_its_end() -> None:
    kept, recording, stats = made()
    sent = asked("r-suffix", 5.0, 7, **{REQUEST_ID_KEY: "r"})
    recording.began(sent)
    stats.idle_s["no_work"] += 1.5
    recording.ran(7)
    recording.verified(Verification(sent, 7, 0, 0, UNDRAFTED), 1, 0.0)
    step(recording, stats)
    stats.busy_s += 0.002
    stats.idle_s["awaiting_draft"] += 0.25
    recording.ran(0)
    recording.verified(Verification(sent, 8, 4, 4, DraftOrigin("d0", True, 0.004)), 3, 0.25)
    recording.ended(sent, "stop")
    step(recording, stats)

    first, drafted = kept.of(VerificationRow)
    assert (first.request_id, first.base_len, first.draft_tokens, first.tokens, first.drafter) == ("r", 7, 0, 1, "")
    assert drafted == VerificationRow(1, "r", 8, 4, 4, 3, "d0", True, False)
    (request,) = kept.of(RequestRow)
    assert (request.tokens, request.verifications, request.draft_tokens, request.accepted) == (4, 2, 4, 4)
    assert (request.prompt_tokens, request.finish_reason, request.arrived_at) == (7, "stop", 5.0)
    assert request.arrived_at < request.first_token_at <= request.ended_at
    prefill, decode = kept.of(StepRow)
    assert (prefill.step, prefill.prefill_tokens, prefill.requests, prefill.tokens, prefill.drafted) == (0, 7, 1, 1, 0)
    assert prefill.idle_ms == {"no_work": 1500.0}
    assert prefill.interval_ms == 0
    assert (decode.step, decode.prefill_tokens, decode.drafted, decode.drafted_tokens, decode.plan_k) == (1, 0, 1, 3, 4)
    assert (decode.waiting, decode.kv_usage) == (3, 0.25)
    assert decode.draft_ms == pytest.approx(4)
    assert decode.busy_ms == pytest.approx(12)
    assert decode.interval_ms == pytest.approx(10 + 2 + 250)
    assert list(decode.idle_ms) == ["awaiting_draft"]
    assert kept.rows.index(request) < kept.rows.index(decode), "a step comes after what happened in it"


def test_a_step_without_an_outcome_makes_no_row_and_loses_no_time() -> None:
    kept, recording, stats = made()
    stats.busy_s += 0.5
    recording.stepped(scheduling(stats, Plan(0)), 0.5)
    assert kept.rows == []
    recording.ran(3)
    step(recording, stats)
    assert kept.of(StepRow)[0].busy_ms == pytest.approx(510)


def test_rows_that_begin_late_leave_out_what_was_before() -> None:
    kept, _, stats = made()
    stats.verify_s += 1.0
    stats.busy_s += 3.0
    stats.steps += 1
    stats.idle_s["no_work"] += 2.0
    late = Recording(kept.rows.append, stats)
    for _ in range(2):
        stats.idle_s["no_work"] += 0.5
        late.ran(1)
        step(late, stats)
    first, second = kept.of(StepRow)
    assert (first.step, second.step) == (1, 2)
    assert (first.interval_ms, first.idle_ms) == (0, {"no_work": 500.0})
    assert (first.busy_ms, second.interval_ms) == (pytest.approx(10), pytest.approx(510))
    assert [first.verify_ms, second.verify_ms] == pytest.approx([5, 5])


def test_a_request_aborted_before_its_first_token() -> None:
    kept, recording, _ = made()
    recording.began(asked("r", 1.0, 3))
    recording.ended(asked("r", 1.0, 3), "abort")
    recording.ended(asked("began before the rows", 1.0, 3), "abort")
    (row,) = kept.rows
    assert isinstance(row, RequestRow)
    assert (row.tokens, row.first_token_at, row.finish_reason) == (0, 0.0, "abort")


def test_a_change_of_plan_belongs_to_the_step_that_comes() -> None:
    kept, recording, stats = made()
    recording.ran(1)
    step(recording, stats)
    alone, drafted = Prospect((0.0, 0.5, 0.6), (0.0, 0.1, 0.2)), Prospect((0.0, 1.0, 1.8), (0.0, 0.9, 1.5))
    load = StepLoad(3, alone, drafted, Foresight(8, 2))
    recording.decided(Plan(2, outcomes=8), load, Choice(Ask.AHEAD, 2, 200.0), 0.01)
    recording.decided(Plan(0), load, Choice(Ask.PLAIN, 0, 100.0), 0.01)
    ahead, plain = kept.of(DecisionRow)
    assert (ahead.step, ahead.requests, ahead.plan_k, ahead.plan_outcomes) == (1, 3, 2, 8)
    assert (ahead.tokens_per_s, ahead.verify_s) == (200.0, 0.01)
    assert (ahead.hit_rate, plain.hit_rate) == (load.foresight.rate(8, drafted.tokens[2]), 0.0)
    assert (ahead.drafted_tokens, ahead.acceptance_length) == (1.8, 2.5)
    assert (plain.plan_k, plain.plan_outcomes, plain.tokens_per_s) == (0, 0, 100.0)
    assert (plain.drafted_tokens, plain.acceptance_length) == (0.6, 1.2), "what the text itself brings"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (None, "engine-id"),
        ({}, "engine-id"),
        ({REQUEST_ID_KEY: "mine"}, "mine"),
        ({REQUEST_ID_KEY: ""}, "engine-id"),
        ({REQUEST_ID_KEY: 7}, "engine-id"),
        ({REQUEST_ID_KEY: "x" * 999}, "x" * LONGEST_REQUEST_ID),
    ],
)
def test_rows_carry_the_clients_own_id(arguments: dict[str, object] | None, name: str) -> None:
    assert name_for_records("engine-id", arguments) == name


def client_of(gateway: int, name: str, rule: Rule, *, asks: bool = True) -> SimpleNamespace:
    state = RequestState(RequestOptions(account=asks), rule)
    return SimpleNamespace(request_id=name, client_index=gateway, outrider=state)


def of(request: object, source: str, drafted: int, accepted: int, drafter: str = "d") -> Verification:
    return Verification(request, 9, drafted, accepted, DraftOrigin(drafter, source=source))


def test_only_who_asked_is_counted_and_told_once():
    accounts = Accounts()
    one, two = client_of(4, "r", Rule.GREEDY), client_of(5, "s", Rule.SHARED)
    other = client_of(4, "other", Rule.GREEDY, asks=False)
    for request in (one, two, other):
        accounts.began(request)
    accounts.verified(of(other, "fresh", 3, 2), 3, 0.1)
    accounts.ended(other, "stop")
    assert accounts.take() == {}
    accounts.verified(Verification(one, 9, 0, 0, UNDRAFTED), 1, 0.0)
    accounts.verified(of(one, "fresh", 3, 2), 3, 0.5)
    accounts.verified(of(one, "ahead", 2, 0), 1, 0.25)
    accounts.verified(of(one, "fresh", 4, 2), 3, 0.0)
    accounts.ended(one, "stop")
    tallies = [Tally("fresh", "d", 2, 7, 4), Tally("ahead", "d", 1, 2, 0)]
    assert accounts.take() == {4: [Account("r", 8, 4, [1, 0, 2], tallies, 0.75, "greedy")]}
    assert accounts.take() == {}
    accounts.ended(two, "abort")
    assert accounts.take() == {5: [Account("s", rule="shared_noise")]}


@pytest.mark.parametrize(("emitted", "accepted"), [(9, 8), (8, 8), (2, 2), (1, 1)])
def test_draft_tokens_behind_the_requests_end_are_not_accepted(emitted: int, accepted: int):
    accounts = Accounts()
    traced = client_of(4, "r", Rule.GREEDY, asks=False)
    open_account("r", traced.outrider)
    accounts.began(traced)
    accounts.verified(of(traced, "prediction", 8, 8, ""), emitted, 0.0)
    accounts.ended(traced, "length")
    lengths, tallies = [0] * accepted + [1], [Tally("prediction", "", 1, 8, accepted)]
    assert traced.outrider.account == Account("r", emitted, 1, lengths, tallies, 0.0, "greedy")
    assert accounts.take() == {}, "no gateway has asked: it is a trace's"


def test_a_wait_and_the_work_meanwhile_lie_between_two_steps_and_a_rest_does_not() -> None:
    scheduler = CountingScheduler()
    stats, between = scheduler.counters.stats, []

    def step(seconds: float) -> None:
        scheduler.count_step(seconds, ran=True)
        between.append(scheduler._between_s)

    step(0.5)
    stats.busy_s += 0.25
    stats.idle_s["awaiting_draft"] += 1.0
    step(0.5)
    # An hour of ticks, each a little work.
    stats.busy_s += 60.0
    stats.idle_s["no_work"] += 3540.0
    scheduler.rested()
    step(0.5)
    stats.busy_s += 0.25
    step(0.5)
    assert between == pytest.approx([0.0, 1.25, 0.0, 0.25])


class Vllm:
    """The part of vLLM's scheduler that ends requests: in a step, one by its own token and another by an error."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def _free_request(self, request: Any) -> None:
        del self.requests[request.request_id]

    def finish_requests(self, request_ids: list[str], status: str) -> list[Any]:
        ended = [self.requests[each] for each in request_ids]
        for each in ended:
            each.get_finished_reason = lambda: status
            self._free_request(each)
        return ended

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, Any]:
        self._free_request(self.requests["one"])
        self.finish_requests(["other"], "error")
        ended: list[tuple[Any, ...]] = [("one", [7], "stop"), ("other", [], "error")]
        names = "request_id", "new_token_ids", "finish_reason", "prefill_stats"
        return {0: SimpleNamespace(outputs=[SimpleNamespace(**dict(zip(names, (*each, None), strict=True))) for each in ended])}


class Scheduler(CountingScheduler, Vllm):
    """Counts what it ends."""


class Heard(Observer):
    def __init__(self) -> None:
        self.of: list[tuple[str, str]] = []

    def verified(self, verification: Verification, tokens: int, waited_s: float) -> None:
        self.of.append((verification.request.request_id, "verified"))

    def ended(self, request: Any, reason: str) -> None:
        self.of.append((request.request_id, reason))


def test_every_end_is_told_once_and_behind_the_last_verification() -> None:
    scheduler, heard = Scheduler(), Heard()
    scheduler.observers.append(heard)
    for name in ("one", "other", "third"):
        request = client_of(0, name, Rule.GREEDY)
        request.num_tokens, request.num_prompt_tokens = 9, 5
        scheduler.add_request(request)
    scheduled = SimpleNamespace(num_scheduled_tokens={"one": 1}, scheduled_spec_decode_tokens={})
    scheduler.update_from_output(scheduled, SimpleNamespace(sampled_token_ids=[[7]], req_id_to_index={"one": 0}))
    scheduler.finish_requests(["third"], "abort")
    assert [each for each in heard.of if each[0] == "one"] == [("one", "verified"), ("one", "stop")]
    assert sorted(heard.of) == [("one", "stop"), ("one", "verified"), ("other", "error"), ("third", "abort")]
    assert scheduler.counters.stats.requests_finished == {"stop": 1, "error": 1, "abort": 1}
    assert [each.request_id for each in scheduler.accounts.take()[0]] == ["other", "one", "third"]
